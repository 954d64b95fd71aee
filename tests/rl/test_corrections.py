"""Truncated importance sampling by hand, and the interface that other corrections plug into."""

import math

import pytest
import torch

from tracefp4.config import CorrectionConfig
from tracefp4.errors import ConfigError
from tracefp4.rl import corrections
from tracefp4.rl.corrections import correction_weights

TIS = CorrectionConfig(name="tis", cap=2.0)


def test_tis_by_hand():
    old = torch.tensor([[0.0, -1.0, -1.0, 5.0]], requires_grad=True)
    rollout = torch.tensor([[0.0, -1.5, -4.0, 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    weights, stats = correction_weights(old, rollout, mask, TIS)
    torch.testing.assert_close(weights, torch.tensor([[1.0, math.exp(0.5), 2.0, 0.0]]))
    assert not weights.requires_grad
    metrics = stats.metrics()
    assert metrics["correction/changed_frac"] == pytest.approx(1 / 3)
    assert metrics["correction/ratio_max"] == pytest.approx(math.exp(3), rel=1e-5)
    w = [1.0, math.exp(0.5), 2.0]
    assert metrics["correction/weight_mean"] == pytest.approx(sum(w) / 3)
    assert metrics["correction/ess"] == pytest.approx(sum(w) ** 2 / (3 * sum(x * x for x in w)))


def test_none_weighs_one_and_changes_nothing():
    mask = torch.tensor([[True, False]])
    weights, stats = correction_weights(torch.ones(1, 2), torch.zeros(1, 2), mask, CorrectionConfig(name="none"))
    assert weights.tolist() == [[1.0, 0.0]]
    assert stats.metrics()["correction/changed_frac"] == 0.0
    assert stats.metrics()["correction/ess"] == pytest.approx(1.0)


def test_extreme_and_masked_values_stay_finite():
    old = torch.tensor([[1e4, -1e4, float("nan")]])
    weights, stats = correction_weights(old, torch.zeros(1, 3), torch.tensor([[True, True, False]]), TIS)
    torch.testing.assert_close(weights, torch.tensor([[2.0, math.exp(-20.0), 0.0]]))
    assert all(math.isfinite(v) for v in stats.metrics().values())


def test_stats_of_micro_batches_add_up():
    torch.manual_seed(0)
    old, rollout, mask = torch.randn(4, 5), torch.randn(4, 5), torch.rand(4, 5) > 0.3
    _, whole = correction_weights(old, rollout, mask, TIS)
    parts = [correction_weights(old[r], rollout[r], mask[r], TIS)[1] for r in (slice(0, 1), slice(1, 4))]
    assert (parts[0] + parts[1]).metrics() == pytest.approx(whole.metrics())


def test_another_correction_is_one_function(monkeypatch):
    def icepop(log_ratio, mask, config):
        ratio = log_ratio.exp()
        return torch.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)

    monkeypatch.setitem(corrections.CORRECTIONS, "tis", icepop)
    weights, stats = correction_weights(
        torch.tensor([[0.0, 2.0, -1.0]]), torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), TIS
    )
    assert weights.tolist() == [[1.0, 0.0, 0.0]]
    assert stats.metrics()["correction/changed_frac"] == pytest.approx(2 / 3)


def test_shapes_and_names_are_checked():
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ConfigError, match="one shape"):
        correction_weights(torch.zeros(1, 3), torch.zeros(1, 2), mask, TIS)
    with pytest.raises(ConfigError, match="did you mean 'tis'"):
        correction_weights(torch.zeros(1, 2), torch.zeros(1, 2), mask, TIS.model_copy(update={"name": "tiss"}))
