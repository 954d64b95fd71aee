"""Intervals: against closed forms, and how often they cover the truth."""

import numpy as np
import pytest

from tracefp4.errors import TaskError
from tracefp4.rl.statistics import (
    cluster_sums,
    crossed_bootstrap,
    mean_bootstrap,
    ratio_bootstrap,
    wilson,
)


def test_ratio_of_sums_weighs_by_size():
    interval = ratio_bootstrap([1.0, 30.0], [1, 10])
    assert interval.estimate == pytest.approx(31 / 11)
    assert interval.low <= interval.estimate <= interval.high
    assert (interval.low, interval.high) == (1.0, 3.0)  # both draws of one cluster are common with two clusters


def test_cluster_sums_need_not_be_sorted():
    sums, counts = cluster_sums([1.0, 2.0, 3.0, 4.0], [9, 2, 9, 2])
    assert (sums.tolist(), counts.tolist()) == ([6.0, 4.0], [2.0, 2.0])


def test_the_seed_decides():
    rng = np.random.default_rng(1)
    a, b = rng.exponential(size=30), rng.integers(1, 50, 30)
    assert ratio_bootstrap(a, b, seed=3) == ratio_bootstrap(a, b, seed=3)
    assert ratio_bootstrap(a, b, seed=3) != ratio_bootstrap(a, b, seed=4)


def test_width_matches_the_standard_error():
    x = np.random.default_rng(2).normal(size=400)
    interval = mean_bootstrap(x, resamples=8000)
    error = x.std() / 400**0.5
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.06)


def test_coverage_of_the_ratio_interval():
    # Prompts differ in mean and in length; tokens of a prompt are alike. The truth is E[length * mean] / E[length].
    rng = np.random.default_rng(3)
    hits = naive_hits = 0
    trials, prompts = 300, 40
    truth = 1.0
    for trial in range(trials):
        lengths = rng.integers(5, 60, prompts)
        means = rng.gamma(2.0, 0.5, prompts)
        interval = ratio_bootstrap(means * lengths, lengths, resamples=400, seed=trial)
        hits += interval.low <= truth <= interval.high
        tokens = np.repeat(means, lengths)
        half = 1.96 * tokens.std() / tokens.size**0.5
        naive_hits += abs(tokens.mean() - truth) <= half
    assert 0.88 <= hits / trials <= 0.98
    assert naive_hits / trials < 0.5  # an interval over tokens is far too narrow: the reason for resampling prompts


def test_a_single_cluster_has_no_interval():
    interval = ratio_bootstrap([2.0], [4.0])
    assert (interval.estimate, interval.low, interval.high) == (0.5, None, None)
    assert interval.to_dict()["low"] is None


def test_clusters_without_tokens_do_not_divide_by_zero():
    interval = ratio_bootstrap([0.0, 0.0, 3.0], [0.0, 0.0, 1.0], resamples=500)
    assert (interval.low, interval.high) == (3.0, 3.0)


def test_many_clusters_are_drawn_in_chunks():
    x = np.random.default_rng(5).normal(size=20_000)
    interval = mean_bootstrap(x, resamples=300)
    assert interval.low < x.mean() < interval.high


def test_wilson_by_hand_and_at_the_ends():
    # 8 of 10 at 95 %: 0.4902 .. 0.9433 (Newcombe, Statistics in Medicine 17, 1998, method 3).
    interval = wilson(8, 10)
    assert (interval.low, interval.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0, 20).low == 0.0
    assert 0 < wilson(0, 20).high < 0.2
    assert wilson(20, 20).high == 1.0


def test_wilson_covers():
    rng = np.random.default_rng(6)
    hits = sum(
        interval.low <= 0.07 <= interval.high
        for interval in (wilson(int(c), 100) for c in rng.binomial(100, 0.07, 2000))
    )
    assert 0.92 <= hits / 2000 <= 0.98


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ratio_bootstrap([], []), "0 numerators"),
        (lambda: ratio_bootstrap([1.0], [1.0, 2.0]), "1 numerators and 2"),
        (lambda: ratio_bootstrap([1.0, 1.0], [0.0, 0.0]), "positive"),
        (lambda: ratio_bootstrap([1.0, 1.0], [1.0, 1.0], confidence=95), "usual: 0.95"),
        (lambda: cluster_sums([1.0], [1, 2]), "one for one"),
        (lambda: wilson(3, 2), "3 successes of 2"),
    ],
)
def test_impossible_requests_are_refused(call, message):
    with pytest.raises(TaskError, match=message):
        call()


def test_crossed_bootstrap_knows_both_sources_of_spread():
    rng = np.random.default_rng(0)
    items = rng.normal(size=400)
    level = np.tile(items, (3, 1))
    by_items = crossed_bootstrap(level)
    assert by_items.estimate == pytest.approx(items.mean())
    half = (by_items.high - by_items.low) / 2
    assert half == pytest.approx(1.96 * items.std() / 20, rel=0.1)
    # Seeds that differ by a constant widen the interval, however many items there are.
    moved = crossed_bootstrap(level + np.array([[-1.0], [0.0], [1.0]]))
    assert moved.high - moved.low > 3 * (by_items.high - by_items.low)
    assert moved.method == "bootstrap over seeds and items"


def test_crossed_bootstrap_of_one_seed_is_that_of_items():
    found = crossed_bootstrap([[0.0, 1.0, 1.0, 0.0]])
    assert (found.estimate, found.clusters, found.method) == (0.5, 4, "bootstrap over items")
    assert crossed_bootstrap([[1.0], [0.0]]).low is None
    with pytest.raises(TaskError, match="seeds by items"):
        crossed_bootstrap([1.0, 2.0])
