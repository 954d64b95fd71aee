"""The convolution kernel against the plain code, in rows of a pool."""

from __future__ import annotations

import pytest
import torch

from tracefp4.kernels import convolution
from tracefp4.models.recurrence import convolve


@pytest.mark.parametrize(
    ("batch", "channels", "dtype"),
    [(1, 64, torch.bfloat16), (3, 300, torch.bfloat16), (5, 513, torch.float32), (7, 256, torch.float16)],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_output_and_windows_of_the_plain_code(batch, channels, dtype, with_bias, device, same, monkeypatch):
    g = torch.Generator().manual_seed(channels)
    wide, pool, weight, bias = (
        torch.randn(*shape, generator=g).to(dtype).to(device)
        for shape in ((batch, channels + 7), (batch + 3, 4, channels), (channels, 4), (channels,))
    )
    x, bias = wide[:, 3 : 3 + channels], bias if with_bias else None  # rows with a stride
    rows = torch.randperm(batch + 3, generator=g)[:batch].to(device)
    untouched, kept = pool.clone(), pool.clone()
    found = convolve(x, pool, rows, weight, bias)
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    expected = convolve(x, kept, rows, weight, bias)
    tolerance = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 4)
    assert same(pool, kept)
    others = [i for i in range(batch + 3) if i not in rows.tolist()]
    assert same(pool[others], untouched[others])


def test_other_lengths_are_left_to_the_plain_code(device, monkeypatch):
    monkeypatch.setattr(convolution, "convolve", lambda *_: pytest.fail("not four taps"))
    pool = torch.ones(2, 3, 8, device=device)
    out = convolve(torch.ones(1, 8, device=device), pool, torch.tensor([1], device=device), pool.new_ones(8, 3))
    torch.testing.assert_close(out, torch.nn.functional.silu(torch.full((1, 8), 3.0, device=device)))


def test_a_padding_row_may_be_named_several_times(device):
    g = torch.Generator().manual_seed(0)
    x, pool, weight = (torch.randn(*shape, generator=g).to(device) for shape in ((4, 32), (3, 4, 32), (32, 4)))
    before = pool.clone()
    out = convolve(x, pool, torch.tensor([2, 0, 2, 2], device=device), weight)
    alone = convolve(x[1:2], before, torch.tensor([0], device=device), weight)
    assert torch.equal(out[1:2], alone) and torch.equal(pool[:2], before[:2])
