"""Norms, rotary embedding and the gate of a training step: against the eager code and its autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tracefp4.kernels.gate import gate, gate_backward
from tracefp4.kernels.norm import norm, norm_backward
from tracefp4.kernels.rotary import rotate
from tracefp4.models.norms import plain_norm
from tracefp4.models.rotary import turned


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _apart(found, expected):
    """Share of values that differ, and the largest difference in units of bfloat16's precision."""
    found, expected = found.float().cpu(), expected.float().cpu()
    gap = (found - expected).abs() / expected.abs().clamp_min(1e-3)
    return float((found != expected).float().mean()), float(gap.max() * 256)


@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 5, 64), (37, 576), (300, 80), (3, 2048)], ids=str)
def test_norm_and_its_gradient(shape, device):
    x, weight, grad = _random(*shape) * 3, _random(shape[-1], seed=1) + 1, _random(*shape, seed=2)
    x[..., 0, :] *= 1e-3
    found, inverse = norm(x.to(device), weight.to(device), 1e-6)
    expected = plain_norm(x, weight, 1e-6)
    assert _apart(found, expected) <= (0.002, 2.1)
    wide = x.double().requires_grad_()
    factor = weight.double().requires_grad_()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    (normal * factor).backward(grad.double())
    assert wide.grad is not None and factor.grad is not None
    grad_x, grad_weight = norm_backward(grad.to(device), x.to(device), weight.to(device), inverse)
    scale = wide.grad.abs().amax(-1, keepdim=True)
    assert float(((grad_x.cpu().double() - wide.grad) / scale).abs().max()) < 0.01
    assert float((grad_weight.cpu().double() - factor.grad).abs().max() / factor.grad.abs().max()) < 0.01


def test_gradient_of_a_norm_is_as_exact_as_the_eager_one(device):
    x, weight, grad = _random(200, 128), _random(128, seed=1) + 1, _random(200, 128, seed=2)
    exact_x = x.double().requires_grad_()
    (exact_x * torch.rsqrt(exact_x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()).backward(grad.double())
    eager = x.clone().requires_grad_()
    plain_norm(eager, weight, 1e-6).backward(grad)
    _, inverse = norm(x.to(device), weight.to(device), 1e-6)
    found = norm_backward(grad.to(device), x.to(device), weight.to(device), inverse)[0]
    assert exact_x.grad is not None and eager.grad is not None
    errors = [float((g.cpu().double() - exact_x.grad).square().mean()) for g in (found, eager.grad)]
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("heads", [(9, 3), (4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("width", [64, 24])
def test_rotary_embedding_turns_as_the_eager_code_does(heads, shared, width, device, same):
    batch, length = 2, 5
    q, k = (_random(batch, length, h, width, seed=h).transpose(1, 2) for h in heads)
    for x in (q, k):
        x[0, 0, 1] = 0.0  # zeros keep their signs
    angles = torch.rand(1 if shared else batch, length, width, generator=torch.Generator().manual_seed(1)) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    grads = [_random(*x.shape, seed=7 + i) for i, x in enumerate((q, k))]
    found = rotate(*(x.to(device) for x in (q, k, cos, sin)))
    back = rotate(*(x.to(device) for x in (*grads, cos, sin)), back=True)
    for x, turn, grad, gradient in zip((q, k), found, grads, back, strict=True):
        leaf = x.clone().requires_grad_()
        expected = turned(leaf, cos[:, None], sin[:, None])
        expected.backward(grad)
        assert leaf.grad is not None
        assert same(turn, expected.detach())
        assert torch.equal(gradient.cpu(), leaf.grad)  # a zero may have the other sign
        assert turn.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("rows,width", [(1, 32), (7, 1100)])
def test_gate_and_its_gradient(rows, width, device):
    x, grad = _random(rows, 2 * width) * 4, _random(rows, width, seed=1)
    leaf = x.clone().requires_grad_()
    low, high = leaf.chunk(2, dim=-1)
    expected = F.silu(low) * high
    expected.backward(grad)
    assert leaf.grad is not None
    assert _apart(gate(x.to(device)), expected.detach()) <= (0.002, 1.1)
    share, most = _apart(gate_backward(grad.to(device), x.to(device)), leaf.grad)
    assert share <= 0.01
    assert most <= 2.1
