"""Losses against numbers worked out by hand, invariance under splitting, and what masked places may not do."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.config import LossConfig
from tracefp4.errors import ConfigError, TaskError
from tracefp4.rl.losses import Denominators, aggregate, policy_loss, reference_kl

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def config(**settings):
    return LossConfig(**{"aggregation": "token-mean", **settings})


def one(ratio, advantage, **settings):
    """Loss of a single token with the given ratio."""
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    args = (logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool))
    loss, stats = policy_loss(*args, Denominators(1, 1, 1), config(**settings))
    loss.backward()
    return loss.item(), logprobs.grad.item(), stats.metrics()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range: -r A, and d/dlogp of it is -r A
        (1.5, 2.0, -2.4, 0.0),  # above 1 + 0.2 with A > 0: clipped
        (0.5, 2.0, -1.0, -1.0),  # below the range but A > 0: the pessimistic side keeps its gradient
        (0.5, -2.0, 1.6, 0.0),  # below 1 - 0.2 with A < 0: clipped
        (1.5, -2.0, 3.0, 3.0),  # above the range but A < 0: keeps its gradient
        (5.0, -2.0, 6.0, 0.0),  # dual clip at c = 3: -c A
    ],
)
def test_grpo_by_hand(ratio, advantage, loss, gradient):
    value, grad, _ = one(ratio, advantage)
    assert value == pytest.approx(loss, rel=1e-6)
    assert grad == pytest.approx(gradient, rel=1e-6)


def test_dapo_clips_higher():
    assert one(1.25, 1.0, eps_high=0.28)[0] == pytest.approx(-1.25)
    assert one(1.5, 1.0, eps_high=0.28)[0] == pytest.approx(-1.28)


def test_clips_are_counted_by_side():
    assert one(1.5, 2.0)[2]["clip_frac/high"] == 1.0
    assert one(0.5, -2.0)[2]["clip_frac/low"] == 1.0
    metrics = one(5.0, -2.0)[2]
    assert (metrics["clip_frac/dual"], metrics["clip_frac"]) == (1.0, 0.0)
    assert metrics["ratio/max"] == pytest.approx(5.0)
    assert one(1.0, 1.0)[2]["clip_frac"] == 0.0


def test_k3_penalty_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -2.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    expected = math.exp(-0.5) - 1 + 0.5
    torch.testing.assert_close(reference_kl(logprobs, reference, mask), torch.tensor([[expected, 0.0]]))
    loss, stats = policy_loss(
        logprobs, logprobs.detach(), torch.zeros(1), mask, Denominators(2, 1), config(kl=0.1), ref_logprobs=reference
    )
    assert loss.item() == pytest.approx(0.1 * expected / 2)
    assert stats.metrics()["kl_reference/mean"] == pytest.approx(expected / 2)
    loss.backward()
    # d/dlogp of exp(ref - p) - 1 - (ref - p) is 1 - exp(ref - p).
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.1 * (1 - math.exp(-0.5)) / 2, 0.0]]))


def test_gspo_by_hand():
    # Log-ratios 0.1 and 0.3 give one ratio e^0.2 for both tokens; the second sequence has e^-0.1.
    logprobs = torch.tensor([[0.1, 0.3], [-0.1, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    settings = {"name": "gspo", "aggregation": "seq-mean-token-mean", "eps_low": 0.5, "eps_high": 0.5}
    loss, stats = policy_loss(
        logprobs, torch.zeros(2, 2), torch.tensor([1.0, -2.0]), mask, Denominators(3, 2), config(**settings)
    )
    s1, s2 = math.exp(0.2), math.exp(-0.1)
    assert loss.item() == pytest.approx((-s1 + 2 * s2) / 2)
    loss.backward()
    expected = torch.tensor([[-s1 / 4, -s1 / 4], [2 * s2 / 2, 0.0]])
    torch.testing.assert_close(logprobs.grad, expected)
    assert stats.metrics()["ratio/max"] == pytest.approx(s1)


def test_gspo_gradient_is_that_of_the_sequence_loss():
    torch.manual_seed(0)
    logprobs = torch.randn(4, 6, requires_grad=True)
    old, advantages = torch.randn(4, 6), torch.randn(4)
    mask = torch.arange(6) < torch.tensor([6, 3, 1, 4])[:, None]
    lengths = mask.sum(-1)
    s = (((logprobs - old) * mask).sum(-1) / lengths).exp()
    direct = torch.maximum(-advantages * s, -advantages * s.clamp(0.7, 1.4)).mean()
    (expected,) = torch.autograd.grad(direct, logprobs)
    settings = {"name": "gspo", "aggregation": "seq-mean-token-mean", "eps_low": 0.3, "eps_high": 0.4}
    denominators = Denominators.of(lengths.tolist())
    loss, _ = policy_loss(logprobs, old, advantages, mask, denominators, config(**settings))
    torch.testing.assert_close(loss, direct)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, expected)


def test_gspo_with_its_own_clip_range_stops_small_moves():
    settings = {"name": "gspo", "eps_low": 3e-4, "eps_high": 4e-4}
    assert one(1.001, 1.0, **settings)[1] == 0.0
    assert one(1.0003, 1.0, **settings)[1] != 0.0
    assert one(50.0, -1.0, **settings)[0] == pytest.approx(50.0)  # no dual clip


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / (2 * 8)),
    ],
)
def test_aggregations_by_hand(mode, expected):
    losses = torch.tensor([[1.0, 2.0, 3.0], [10.0, float("nan"), 99.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert aggregate(losses, mask, Denominators.of([3, 1], norm_length=8), mode).item() == pytest.approx(expected)


def test_unknown_names_are_refused_with_the_nearest():
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        aggregate(torch.zeros(1, 1), mask, Denominators(1, 1), "token-meen")
    with pytest.raises(ConfigError, match="norm length"):
        aggregate(torch.zeros(1, 1), mask, Denominators(1, 1), "seq-mean-token-sum-norm")
    with pytest.raises(ConfigError, match="reference"):
        policy_loss(*[torch.zeros(1, 1)] * 2, torch.zeros(1), mask, Denominators(1, 1), config(kl=0.1))
    with pytest.raises(ConfigError, match="one shape"):
        policy_loss(torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1), mask, Denominators(1, 1), config())
    with pytest.raises(TaskError, match="at least one response token"):
        Denominators.of([0, 0])


def batch(seed, rows=6, width=7):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = torch.arange(width) < lengths[:, None]
    tensors = [torch.randn(rows, width, generator=g) for _ in range(4)]
    return tensors, torch.randn(rows, generator=g) * 2, mask, lengths.tolist()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["grpo", "gspo"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
def test_micro_batches_add_up_to_the_batch(name, aggregation, seed, cut):
    (logprobs, old, reference, weights), advantages, mask, lengths = batch(seed)
    denominators = Denominators.of(lengths, norm_length=7)
    cfg = config(name=name, aggregation=aggregation, kl=0.05)

    def loss_of(rows):
        width = int(mask[rows].sum(-1).max())  # a micro-batch is padded to its own longest row
        leaf = logprobs[rows, :width].clone().requires_grad_()
        loss, stats = policy_loss(
            leaf,
            old[rows, :width],
            advantages[rows],
            mask[rows, :width],
            denominators,
            cfg,
            weights=weights[rows, :width].abs(),
            ref_logprobs=reference[rows, :width],
        )
        loss.backward()
        return loss.detach(), torch.nn.functional.pad(leaf.grad, (0, 7 - width)), stats

    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    whole, gradient, stats = loss_of(torch.arange(6))
    parts = [loss_of(order[:cut]), loss_of(order[cut:])]
    torch.testing.assert_close(sum(p[0] for p in parts), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), gradient[order], rtol=1e-5, atol=1e-7)
    merged = (parts[0][2] + parts[1][2]).metrics()
    assert merged == pytest.approx(stats.metrics(), rel=1e-5)


def test_masked_places_reach_neither_loss_nor_gradient():
    (logprobs, old, reference, weights), advantages, mask, lengths = batch(3)
    cfg = config(kl=0.1)

    def run(filler):
        dirty = [torch.where(mask, x, filler) for x in (logprobs, old, reference, weights.abs())]
        leaf = dirty[0].requires_grad_()
        loss, _ = policy_loss(
            leaf, dirty[1], advantages, mask, Denominators.of(lengths), cfg, weights=dirty[3], ref_logprobs=dirty[2]
        )
        loss.backward()
        return loss.detach(), leaf.grad

    clean, gradient = run(0.0)
    for filler in (float("nan"), float("-inf"), 1e30):
        loss, grad = run(filler)
        torch.testing.assert_close(loss, clean)
        torch.testing.assert_close(grad, gradient)


def test_huge_log_ratios_stay_finite():
    loss, gradient, _ = one(math.exp(19), -1.0)
    assert math.isfinite(loss)
    logprobs = torch.tensor([[500.0]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, _ = policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([-1.0]), mask, Denominators(1, 1), config())
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()
    assert gradient == 0.0


def test_weights_scale_their_token_only():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    weights = torch.tensor([[2.0, 0.5]], requires_grad=True)
    loss, _ = policy_loss(
        logprobs, torch.zeros(1, 2), torch.tensor([1.0]), mask, Denominators(2, 1), config(), weights=weights
    )
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, -0.25]]))
    assert weights.grad is None


@pytest.mark.gpu
def test_cuda_equals_cpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    (logprobs, old, reference, weights), advantages, mask, lengths = batch(1)
    found = []
    for device in ("cpu", "cuda"):
        args = [x.to(device) for x in (logprobs, old, advantages, mask)]
        extra = {"weights": weights.abs().to(device), "ref_logprobs": reference.to(device)}
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")  # nothing may wait for the device
        loss, stats = policy_loss(*args, Denominators.of(lengths), config(kl=0.1), **extra)
        torch.cuda.set_sync_debug_mode("default")
        found.append((loss.cpu(), stats.metrics()))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
