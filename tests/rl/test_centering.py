"""Score centering: the formula by hand, and the drift that it removes."""

import pytest
import torch

from tracefp4 import config as settings
from tracefp4.config import LossConfig
from tracefp4.errors import ConfigError
from tracefp4.rl.centering import centering_term, check_centering
from tracefp4.rl.losses import Denominators, policy_loss


def test_by_hand():
    # Head of two tokens: p = .5, .2 and q = .4, .4; tails .3 and .2, so rho = 2/3.
    p = torch.tensor([[0.5, 0.2]]).log().requires_grad_()
    q = torch.tensor([[0.4, 0.4]]).log()
    rho = 0.2 / 0.3
    weights = torch.tensor([[0.4 - rho * 0.5, 0.4 - rho * 0.2]])
    term = centering_term(p, q)
    torch.testing.assert_close(term, (weights * p.detach()).sum(-1))
    (gradient,) = torch.autograd.grad(term.sum(), p)
    torch.testing.assert_close(gradient, weights)
    # With a cap of 1: m = min(p, q) = .4, .2 and alpha = rho.
    capped = torch.tensor([[0.4 - rho * 0.5, 0.2 - rho * 0.2]])
    torch.testing.assert_close(centering_term(p, q, 1.0), (capped * p.detach()).sum(-1))
    # With a cap of 2: m = p, alpha = 1: nothing is truncated, so nothing drifts.
    torch.testing.assert_close(centering_term(p, q, 2.0), torch.zeros(1))


@pytest.mark.parametrize("cap", [None, 1.2])
def test_a_constant_advantage_trains_nothing(cap):
    """With the whole vocabulary as head, the mean gradient over all tokens, weighted by q, is zero."""
    torch.manual_seed(0)
    logits = torch.randn(6, requires_grad=True)
    q = torch.randn(6).log_softmax(-1)
    total = torch.zeros(6)
    for y in range(6):
        p = logits.log_softmax(-1)
        ratio = (p[y] - q[y]).detach().exp()
        weight = torch.ones(()) if cap is None else ratio.clamp_max(cap)
        loss, _ = policy_loss(
            p[y].view(1, 1),
            p[y].detach().view(1, 1),
            torch.ones(1),
            torch.ones(1, 1, dtype=torch.bool),
            Denominators(1, 1),
            LossConfig(name="reinforce"),
            weights=weight.view(1, 1),
            centering=centering_term(p[None], q[None], cap).view(1, 1),
        )
        total += q[y].exp() * torch.autograd.grad(loss, logits)[0]
    assert total.abs().max() < 1e-6
    # Without centering the same sum pulls p towards q.
    drift = q.exp() - logits.detach().softmax(-1)
    assert drift.abs().max() > 0.05


def test_a_tail_that_is_modelled_exactly_changes_nothing():
    """If q is proportional to p outside the head, head and whole vocabulary give the same gradient."""
    torch.manual_seed(1)
    logits = torch.randn(8, requires_grad=True)
    p = logits.log_softmax(-1)
    head = torch.tensor([0.3, 0.2, 0.1])
    tail = p.detach()[3:].exp()
    q = torch.cat([head, tail / tail.sum() * 0.4]).log()
    (short,) = torch.autograd.grad(centering_term(p[None, :3], q[None, :3]).sum(), logits, retain_graph=True)
    (whole,) = torch.autograd.grad(centering_term(p[None], q[None]).sum(), logits)
    torch.testing.assert_close(short, whole)


def test_what_centering_cannot_be_combined_with():
    base = {"loss": {"name": "reinforce", "score_centering": True}}
    check_centering(settings.parse(base))
    check_centering(settings.parse({**base, "correction": {"name": "none"}}))
    for correction in ({"name": "icepop"}, {"level": "sequence"}, {"reject": "veto"}):
        with pytest.raises(ConfigError, match="token-level tis"):
            check_centering(settings.parse({**base, "correction": correction}))
    with pytest.raises(ConfigError, match="loss.name = 'reinforce'"):
        check_centering(settings.parse({"loss": {"score_centering": True}}))
