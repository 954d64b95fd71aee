"""Mismatch metrics against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from tracefp4.errors import TaskError
from tracefp4.rl.metrics import k3, mismatch_by_position, mismatch_details, mismatch_metrics, token_deltas


def test_metrics_by_hand():
    metrics = mismatch_metrics([0.5, -1.0, 0.0, 0.0])
    a, b = math.exp(0.5) - 1.5, math.exp(-1.0)
    assert metrics["mismatch_kl/mean"] == pytest.approx((a + b) / 4)
    assert metrics["mismatch_kl/max"] == pytest.approx(b)
    assert (metrics["logprob_diff/min"], metrics["logprob_diff/max"]) == (-1.0, 0.5)
    assert metrics["logprob_diff/mean_abs"] == pytest.approx(0.375)
    assert metrics["logprob_diff/p99"] == pytest.approx(np.quantile([0.5, 1, 0, 0], 0.99))
    assert "mismatch_kl_unguided/mean" in mismatch_metrics([0.0], "_unguided")


def test_k3_is_accurate_for_small_and_honest_for_large_deltas():
    assert k3(1e-6) == pytest.approx(5e-13, rel=1e-5)
    assert k3(30.0) == pytest.approx(math.exp(30) - 31)
    assert (k3(np.linspace(-5, 5, 101)) >= 0).all()


def test_k3_estimates_the_kl_of_rollout_and_train():
    rng = np.random.default_rng(0)
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    tokens = rng.choice(3, size=200_000, p=q)
    delta = np.log(p[tokens]) - np.log(q[tokens])
    assert mismatch_metrics(delta)["mismatch_kl/mean"] == pytest.approx((q * np.log(q / p)).sum(), rel=0.02)


def test_deltas_skip_what_is_not_response():
    train = torch.tensor([[-1.0, -2.0], [-3.0, float("nan")]], requires_grad=True)
    rollout = torch.tensor([[-1.5, -2.0], [-2.0, 0.0]])
    deltas = token_deltas(train, rollout, torch.tensor([0, 2]))
    assert deltas.dtype is torch.float64
    assert not deltas.requires_grad
    assert deltas.tolist() == [0.5, -1.0]


def test_details_by_hand():
    details = mismatch_details([math.log(3.0), 0.0])
    assert details["mismatch/k1"] == pytest.approx(-math.log(3) / 2)
    assert details["mismatch/prob_error"] == pytest.approx(2.0)
    assert details["mismatch/beyond_2x"] == 0.5
    assert details["mismatch/ess"] == pytest.approx(16 / (10 * 2))
    assert math.isfinite(mismatch_details([800.0, 0.0])["mismatch/ess"])


def test_positions_are_bucketed():
    rows = mismatch_by_position([[0.0] * 3, [0.0, 0.0, 1.0, 1.0]], edges=(0, 2, 4))
    assert [(r["from"], r["tokens"]) for r in rows] == [(0, 4), (2, 3)]
    assert rows[0]["mean_abs"] == 0.0
    assert rows[1]["mean_abs"] == pytest.approx(2 / 3)


def test_no_tokens_is_an_error():
    for function in (mismatch_metrics, mismatch_details, mismatch_by_position):
        with pytest.raises(TaskError, match="no response tokens"):
            function([])
