"""Keys and queries in another basis by kernel equal the plain code bit for bit, and so do gradients."""

from __future__ import annotations

import pytest
import torch

from tracefp4.kernels.runtime import SWITCH
from tracefp4.models.key_basis import KeyBasis, random_signs


def both(basis, x, grad, keys, device, monkeypatch):
    """Result and gradient by the plain code, and by kernel."""
    found = []
    for choice, where in (("reference", torch.device("cpu")), ("triton", device)):
        monkeypatch.setenv(SWITCH, choice)
        there = KeyBasis(*(None if part is None else part.to(where) for part in (basis.centre, basis.signs)))
        leaf = x.to(where).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # tokens before heads
        out = there.keys(leaf) if keys else there.queries(leaf)
        out.backward(grad.to(where))
        found.append((out.detach(), leaf.grad))
    return found


@pytest.mark.parametrize("width", [2, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_plain_code(width, dtype, device, same, monkeypatch):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(2, 3, 37, width, generator=generator).to(dtype)
    grad = torch.randn(2, 3, 37, width, generator=generator).to(dtype)
    centre = torch.randn(3, 1, width, generator=generator)
    for basis in (KeyBasis(centre, random_signs(width)), KeyBasis(None, random_signs(width)), KeyBasis(centre, None)):
        for keys in (True, False):
            (out, gradient), (found, found_gradient) = both(basis, x, grad, keys, device, monkeypatch)
            assert same(found.cpu(), out) and same(found_gradient.cpu(), gradient)


def test_a_width_that_is_no_power_of_two_can_be_centred(device, same, monkeypatch):
    x, grad = torch.randn(2, 1, 3, 5, 96).bfloat16().unbind(0)
    basis = KeyBasis(torch.randn(3, 1, 96), None)
    (out, gradient), (found, found_gradient) = both(basis, x, grad, True, device, monkeypatch)
    assert same(found.cpu(), out) and same(found_gradient.cpu(), gradient)


def test_one_token_and_none(device, monkeypatch):
    monkeypatch.setenv(SWITCH, "triton")
    basis = KeyBasis(torch.zeros(2, 1, 64, device=device), random_signs(64).to(device))
    assert basis.keys(torch.zeros(1, 2, 0, 64, device=device)).shape == (1, 2, 0, 64)
    one = torch.zeros(1, 2, 1, 64, device=device)
    one[..., 5] = 8.0
    assert basis.keys(one).abs().eq(1.0).all()
