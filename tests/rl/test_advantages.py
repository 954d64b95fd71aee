"""Advantages by hand, groups without a spread, and DAPO's overlong penalty."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.errors import ConfigError, TaskError
from tracefp4.rl.advantages import compute_advantages, overlong_penalty


def test_grpo_by_hand():
    # Group 0: rewards 1, 0, 0, 1: mean 1/2, unbiased std sqrt(1/3). Group 7: 3, 1: mean 2, std sqrt(2).
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([0, 7, 0, 0, 0, 7])
    a, b = 0.5 / ((1 / 3) ** 0.5 + 1e-6), 1 / (2**0.5 + 1e-6)
    expected = torch.tensor([a, b, -a, -a, a, -b])
    torch.testing.assert_close(compute_advantages(rewards, groups).values, expected)


def test_dr_grpo_leaves_the_division_out():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long)
    torch.testing.assert_close(
        compute_advantages(rewards, groups, norm_std=False).values, torch.tensor([0.75, -0.25, -0.25, -0.25])
    )


def test_equal_rewards_give_exactly_zero_and_are_dropped_and_counted():
    # The float64 mean of seven 0.1 is not 0.1, so a mean alone would leave an advantage made of rounding.
    rewards = torch.cat([torch.full((7,), 0.1), torch.tensor([0.0, 1.0]), torch.tensor([5.0])])
    groups = torch.tensor([0] * 7 + [1, 1] + [2])
    result = compute_advantages(rewards, groups)
    assert result.values[:7].tolist() == [0.0] * 7
    assert result.values[9] == 0.0
    assert result.keep.tolist() == [False] * 7 + [True, True] + [False]
    counts = result.counts
    assert (counts.groups, counts.equal, counts.single, counts.samples, counts.dropped) == (3, 1, 1, 10, 8)
    assert counts.metrics()["samples/dropped"] == 8.0
    assert compute_advantages(rewards, groups, filter_groups=False).keep.all()


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([10, 80, 85, 90, 100, 120])
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20), torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0]))


def test_overlong_penalty_enters_the_reward():
    rewards, groups = torch.ones(2), torch.zeros(2, dtype=torch.long)
    result = compute_advantages(
        rewards, groups, norm_std=False, lengths=torch.tensor([10, 100]), overlong_buffer=20, max_length=100
    )
    assert result.rewards.tolist() == [1.0, 0.0]
    assert result.values.tolist() == [0.5, -0.5]
    assert result.counts.overlong == 1
    assert result.keep.all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_not_numbers_are_refused(value):
    with pytest.raises(TaskError, match="sample 1"):
        compute_advantages(torch.tensor([0.0, value]), torch.zeros(2, dtype=torch.long))


def test_bad_shapes_and_buffers_are_refused():
    with pytest.raises(TaskError, match="two equal vectors"):
        compute_advantages(torch.ones(3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ConfigError, match="length of every response"):
        compute_advantages(torch.ones(2), torch.zeros(2, dtype=torch.long), overlong_buffer=4, max_length=8)
    with pytest.raises(ConfigError, match="buffer of 9"):
        overlong_penalty(torch.ones(2), 8, 9)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10, allow_nan=False, width=32)), min_size=1, max_size=40),
    st.floats(-100, 100, width=32),
)
def test_sums_to_zero_and_ignores_order_of_samples(samples, _):
    groups = torch.tensor([g for g, _ in samples])
    rewards = torch.tensor([r for _, r in samples])
    values = compute_advantages(rewards, groups, norm_std=False).values
    for g in groups.unique():
        assert abs(float(values[groups == g].double().sum())) < 1e-4
    order = torch.randperm(len(samples))
    torch.testing.assert_close(compute_advantages(rewards[order], groups[order], norm_std=False).values, values[order])
