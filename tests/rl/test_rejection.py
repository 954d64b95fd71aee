"""Corrections beyond token-level truncation, and rejection rules, by hand."""

import math

import pytest
import torch

from tracefp4.config import CorrectionConfig
from tracefp4.errors import ConfigError
from tracefp4.rl.corrections import correction_weights
from tracefp4.rl.rejection import RULES, parse_rules

# Two sequences, the second with one token of padding that must never count.
RATIOS = torch.tensor([[1.0, 4.0, 0.25], [3.0, 3.0, 1e6]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def weights(**settings):
    old = RATIOS.log()
    found, stats = correction_weights(old, torch.zeros(2, 3), MASK, CorrectionConfig(**settings))
    assert not found[1, 2]
    return found, stats.metrics()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "tis", "cap": 2.0}, [[1, 2, 0.25], [2, 2, 0]]),
        ({"name": "mis", "cap": 2.0}, [[1, 0, 0.25], [0, 0, 0]]),
        ({"name": "icepop"}, [[1, 4, 0], [3, 3, 0]]),
        ({"name": "icepop", "low": 0.2, "high": 3.5}, [[1, 0, 0.25], [3, 3, 0]]),
        ({"name": "tis", "level": "sequence", "cap": 5.0}, [[1, 1, 1], [5, 5, 0]]),
        ({"name": "mis", "level": "sequence", "cap": 5.0}, [[1, 1, 1], [0, 0, 0]]),
        ({"name": "tis", "level": "geometric", "cap": 5.0}, [[1, 1, 1], [3, 3, 0]]),
        ({"name": "icepop", "level": "geometric", "high": 2.0}, [[1, 1, 1], [0, 0, 0]]),
    ],
)
def test_levels_and_rules_by_hand(settings, expected):
    torch.testing.assert_close(weights(**settings)[0], torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("token_k1", [[1, 0, 0], [0, 0, 0]]),  # 0.5_2.0
        ("token_k1=0.2_3.5", [[1, 0, 1], [1, 1, 0]]),
        ("token_k1=5", [[1, 1, 1], [1, 1, 0]]),  # one number: 1/5 to 5
        ("token_k2=0.7", [[1, 0, 0], [1, 1, 0]]),  # log(4)^2 / 2 = 0.96, log(3)^2 / 2 = 0.60
        ("token_k3=0.7", [[1, 0, 1], [0, 0, 0]]),  # 4: 1.61, 1/4: 0.64, 3: 0.90
        ("seq_sum_k1", [[1, 1, 1], [0, 0, 0]]),  # products 1 and 9
        ("seq_sum_k2=1.5", [[0, 0, 0], [1, 1, 0]]),  # 1.92 and 1.21
        ("seq_sum_k3=2", [[0, 0, 0], [1, 1, 0]]),  # 2.25 and 1.80
        ("seq_mean_k1", [[1, 1, 1], [0, 0, 0]]),  # 0.999_1.001
        ("seq_mean_k2=0.62", [[0, 0, 0], [1, 1, 0]]),  # 0.64 and 0.60
        ("seq_mean_k3", [[0, 0, 0], [0, 0, 0]]),  # 0.01
        ("seq_max_k2=0.7", [[0, 0, 0], [1, 1, 0]]),
        ("seq_max_k3=1", [[0, 0, 0], [1, 1, 0]]),
        ("veto=0.3", [[0, 0, 0], [1, 1, 0]]),
        ("veto", [[1, 1, 1], [1, 1, 0]]),
        ("seq_sum_k1, veto=0.3", [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_rejection_rules_by_hand(rule, expected):
    found, metrics = weights(name="none", reject=rule)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))
    assert metrics["correction/rejected_frac"] == pytest.approx(1 - found.sum().item() / 5)


def test_rejection_comes_on_top_of_weights():
    found, metrics = weights(name="tis", cap=2.0, reject="seq_sum_k1")
    torch.testing.assert_close(found, torch.tensor([[1.0, 2.0, 0.25], [0.0, 0.0, 0.0]]))
    assert metrics["correction/changed_frac"] == pytest.approx(3 / 5)


def test_opsm_drops_bad_samples_that_the_policy_has_left():
    old = torch.zeros(3, 2)
    current = torch.tensor([[-0.2, 0.0], [-0.2, 0.0], [0.2, 0.0]])  # mean moved: 0.1, 0.1, -0.1
    advantages = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    config = CorrectionConfig(name="none", reject="opsm")
    found, _ = correction_weights(old, old, mask, config, logprobs=current, advantages=advantages)
    assert found.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    loose = CorrectionConfig(name="none", reject="opsm=0.2")
    assert correction_weights(old, old, mask, loose, logprobs=current, advantages=advantages)[0].all()
    with pytest.raises(ConfigError, match="needs advantages"):
        correction_weights(old, old, mask, config)


def test_every_rule_is_covered_here():
    assert len(RULES) == 13


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vetoo", "did you mean 'veto'"),
        ("token_k2", "takes one bound"),
        ("veto=1_2", "takes one bound"),
        ("token_k1=2_0.5", "no band"),
        ("token_k1=1_2_3", "no band"),
        ("token_k3=x", "no number"),
        ("token_k3=-1", "positive"),
        ("token_k1=0", "positive"),
    ],
)
def test_wrong_rules_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_rules(text)


def test_bounds_are_read_as_given():
    low, high = (math.exp(-20.0), math.exp(20.0))
    (rule,) = parse_rules("token_k1=0.1_1.2")
    assert (rule.low, rule.high) == (0.1, 1.2)
    assert parse_rules("") == ()
    found, _ = correction_weights(
        torch.tensor([[100.0, -100.0]]),
        torch.zeros(1, 2),
        torch.ones(1, 2, dtype=torch.bool),
        CorrectionConfig(name="icepop", low=low / 2, high=high * 2),
    )
    torch.testing.assert_close(found, torch.tensor([[high, low]]))
