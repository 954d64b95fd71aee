"""Mismatch metrics against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from tracefp4.errors import TaskError
from tracefp4.rl.metrics import k3, mismatch_metrics, token_deltas, token_positions


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


def test_positions_are_bucketed():
    deltas = np.concatenate([np.zeros(64), np.ones(3), [0.0, 2.0]])
    positions = [*range(67), 0, 300]
    metrics = mismatch_metrics(deltas, "_unguided", positions)
    found = {name: value for name, value in metrics.items() if "/from_" in name}
    assert found == {
        "mismatch_kl_unguided/from_0": 0.0,
        "mismatch_kl_unguided/from_64": pytest.approx(math.e - 2),
        "mismatch_kl_unguided/from_256": pytest.approx(math.exp(2) - 3),
    }
    assert not any("/from_" in name for name in mismatch_metrics(deltas))


def test_positions_count_from_the_start_of_each_response():
    response = torch.tensor([[False, False, True, True], [True, True, True, False]])
    places = response.flatten().nonzero().squeeze(-1)
    assert token_positions(response, places).tolist() == [0, 1, 0, 1, 2]


def test_no_tokens_is_an_error():
    with pytest.raises(TaskError, match="no response tokens"):
        mismatch_metrics([])
