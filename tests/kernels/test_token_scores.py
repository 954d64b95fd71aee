"""Log-probabilities, entropies and gradients of a training step: against float64 and the eager code."""

from __future__ import annotations

import pytest
import torch

from tracefp4.kernels.token_scores import token_scores, token_scores_backward
from tracefp4.training.policy import _head_logprobs


def _case(rows, vocabulary, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=generator) * spread).bfloat16()
    return logits, torch.randint(0, vocabulary, (rows,), generator=generator), torch.randn(rows, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [(1, 1), (3, 96), (5, 2048), (7, 5003)], ids=str)
def test_scores_and_their_gradient(size, temperature, device):
    logits, targets, grad = _case(*size)
    exact = logits.double().requires_grad_()
    logs = torch.log_softmax(exact / temperature, -1)
    chosen = logs.gather(1, targets[:, None]).squeeze(1)
    (chosen * grad).sum().backward()
    there = [part.to(device) for part in (logits, targets, grad)]
    logprobs, entropy, lse = token_scores(there[0], there[1], temperature)
    assert torch.allclose(logprobs.cpu().double(), chosen.detach(), atol=2e-5)
    assert torch.allclose(entropy.cpu().double(), -(logs.exp() * logs).sum(-1).detach(), atol=1e-4)
    found = token_scores_backward(there[2], there[0], there[1], lse, temperature)
    assert found.dtype is torch.bfloat16 and exact.grad is not None
    assert ((found.cpu().double() - exact.grad).abs() <= exact.grad.abs() / 200 + 1e-6).all()


def test_logits_of_minus_infinity_and_far_apart(device):
    logits, targets, _ = _case(4, 700, spread=200.0)
    logits[:, 100:400] = float("-inf")
    targets = torch.where((targets >= 100) & (targets < 400), 7, targets)
    logprobs, _, lse = token_scores(logits.to(device), targets.to(device), 1.0)
    expected = torch.log_softmax(logits.double(), -1).gather(1, targets[:, None]).squeeze(1)
    assert torch.allclose(logprobs.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    found = token_scores_backward(torch.ones(4, device=device), logits.to(device), targets.to(device), lse, 1.0)
    assert (found[:, 100:400] == 0).all() and found.isfinite().all()


def test_the_head_of_a_training_step(device, monkeypatch):
    torch.manual_seed(0)
    head = torch.nn.Linear(32, 300, bias=False).bfloat16().to(device)
    rows, targets = torch.randn(11, 32).bfloat16().to(device), torch.randint(0, 300, (11,)).to(device)
    results = []
    for choice in ("triton", "reference"):
        monkeypatch.setenv("TRACEFP4_KERNELS", choice)
        x = rows.clone().requires_grad_()
        head.zero_grad()
        chosen, entropy = _head_logprobs(head, x, targets, None, 1.3)
        (chosen * chosen.detach()).sum().backward()
        assert not entropy.requires_grad and head.weight.grad is not None
        results.append([part.detach().float() for part in (chosen, entropy, x.grad, head.weight.grad)])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-2 * expected.norm()
