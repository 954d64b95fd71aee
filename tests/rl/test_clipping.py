"""CISPO, REINFORCE and TBPO by hand; defaults that a loss brings."""

import math

import pytest
import torch

from tracefp4.config import LossConfig, parse
from tracefp4.config_text import to_toml
from tracefp4.rl.losses import Denominators, policy_loss


def one(ratio, advantage, old=-1.0, **settings):
    """Loss and gradient of a single token with this ratio."""
    logprobs = torch.tensor([[old + math.log(ratio)]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    config = LossConfig.model_validate(settings)
    loss, stats = policy_loss(
        logprobs, torch.tensor([[old]]), torch.tensor([advantage]), mask, Denominators(1, 1), config
    )
    loss.backward()
    return loss.item(), logprobs.grad.item(), stats.metrics()


def test_cispo_by_hand():
    # -sg(clip(r)) A log pi; with eps_high = 0.2 a ratio of 1.5 weighs 1.2 and still has a gradient.
    loss, gradient, stats = one(1.5, 2.0, name="cispo")
    assert loss == pytest.approx(-1.2 * 2.0 * (-1.0 + math.log(1.5)))
    assert gradient == pytest.approx(-1.2 * 2.0)
    assert stats["clip_frac/high"] == 1.0
    # No lower bound by default.
    assert one(0.1, -1.0, name="cispo")[1] == pytest.approx(0.1)
    assert one(0.1, -1.0, name="cispo", eps_low=0.3)[1] == pytest.approx(0.7)


def test_reinforce_by_hand():
    loss, gradient, stats = one(3.0, -2.0, name="reinforce")
    assert loss == pytest.approx(2.0 * (-1.0 + math.log(3.0)))
    assert gradient == pytest.approx(2.0)
    assert stats["clip_frac"] == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.05, 1.0, -1.05),  # inside: as PPO
        (1.2, 1.0, 0.0),  # A > 0 above the band: PPO stops it
        (0.8, 1.0, -0.8),  # A > 0 below: PPO lets it come back
        (0.95, -1.0, 0.95),  # A < 0 inside the band
        (0.8, -1.0, 0.0),  # A < 0 below: PPO stops it too
        (1.2, -1.0, 0.0),  # A < 0 above: only the trust band stops it
    ],
)
def test_tbpo_by_hand(ratio, advantage, gradient):
    found = one(ratio, advantage, name="tbpo", eps_low=0.1, eps_high=0.1)
    assert found[1] == pytest.approx(gradient)
    assert found[2]["clip_frac/dual"] == float(ratio > 1.1 and advantage < 0)


def test_tbpo_takes_one_ratio_a_sequence():
    # Log-ratios 0.3 and -0.3 have a mean of 0: inside any band, though each token is far outside.
    logprobs = torch.tensor([[0.3, -0.3]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    config = LossConfig.model_validate({"name": "tbpo"})
    loss, _ = policy_loss(logprobs, torch.zeros(1, 2), torch.tensor([-2.0]), mask, Denominators(2, 1), config)
    loss.backward()
    assert loss.item() == pytest.approx(2.0)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[1.0, 1.0]]))


def test_dapo_is_grpo_with_a_higher_upper_bound():
    assert one(1.25, 1.0, name="grpo")[1] == 0.0
    assert one(1.25, 1.0, name="dapo")[1] == pytest.approx(-1.25)
    assert one(1.25, 1.0, name="dapo")[0] == one(1.25, 1.0, name="grpo", eps_high=0.28)[0]


def test_defaults_follow_the_name_and_what_is_given_stays():
    tree = parse({"loss": {"name": "gspo"}}).loss
    assert (tree.eps_low, tree.eps_high, tree.aggregation) == (3e-4, 4e-4, "seq-mean-token-mean")
    assert parse({"loss": {"name": "gspo", "eps_low": 0.1}}).loss.eps_low == 0.1
    assert parse({}).loss == LossConfig()
    for name in ("grpo", "dapo", "gspo", "cispo", "reinforce", "tbpo"):
        config = parse({"loss": {"name": name}})
        import tomllib

        assert parse(tomllib.loads(to_toml(config))) == config
