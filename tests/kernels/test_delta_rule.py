"""The kernel of the gated delta rule against the plain code, in rows of a pool."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tracefp4.kernels import delta_rule as kernel
from tracefp4.models.recurrence import delta_rule


def inputs(batch: int, key_heads: int, heads: int, key: int, value: int, dtype: torch.dtype, device: torch.device):
    """``(mixed, a, b, log_rate, dt_bias)`` with rows that have a stride, and a pool of three rows more."""
    g = torch.Generator().manual_seed(batch + heads + key)
    width = 2 * key_heads * key + heads * value
    mixed = torch.randn(batch, width + 5, generator=g).to(dtype).to(device)[:, 2 : 2 + width]
    both = 4 * torch.randn(batch, 2 * heads, generator=g).to(dtype)
    both[0, 0] = 40.0  # where softplus is linear
    a, b = both.to(device).split(heads, dim=1)
    log_rate, dt_bias = (torch.randn(heads, generator=g).to(dtype).to(device) for _ in range(2))
    pool = torch.randn(batch + 3, heads, key, value, generator=g).to(device)
    return (mixed, a, b, log_rate, dt_bias), pool


def reference(args: tuple[Tensor, ...], pool: Tensor, rows: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEFP4_KERNELS", "reference")
        return delta_rule(*args, pool, rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "key_heads", "heads", "key", "value"),
    [(1, 1, 1, 128, 128), (3, 2, 4, 32, 32), (5, 1, 3, 16, 48), (2, 2, 2, 64, 16)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_output_and_states_of_the_plain_code(
    batch, key_heads, heads, key, value, dtype, kept, device, same
):  # fmt: skip
    args, pool = inputs(batch, key_heads, heads, key, value, dtype, device)
    pool = pool.to(kept)
    assert kernel.takes(pool)
    rows = torch.randperm(batch + 3, generator=torch.Generator().manual_seed(0))[:batch].to(device)
    untouched, plain = pool.clone(), pool.clone()
    found = delta_rule(*args, pool, rows)
    expected = reference(args, plain, rows)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=2e-5 if dtype is torch.float32 else 2**-7, atol=2e-5)
    # A sum in another order may fall on the other side of a rounding boundary.
    torch.testing.assert_close(pool, plain, rtol=2e-5 if kept is torch.float32 else 2**-7, atol=2e-5)
    others = [i for i in range(batch + 3) if i not in rows.tolist()]
    assert same(pool[others], untouched[others])


@pytest.mark.parametrize(("tile", "warps"), [(8, 1), (32, 1), (32, 4), (64, 4)])
def test_programs_of_other_widths(tile, warps, device):
    args, pool = inputs(3, 1, 2, 32, 64, torch.float32, device)
    rows, plain = torch.tensor([5, 0, 2], device=device), pool.clone()
    mixed, a, b = (x.contiguous() for x in args[:3])
    found = kernel.step(mixed, a, b, *args[3:], pool, rows, tile=tile, warps=warps)
    torch.testing.assert_close(found, reference(args, plain, rows), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(pool, plain, rtol=2e-5, atol=2e-5)


def test_many_steps_stay_together(device):
    """Errors do not pile up: the state fades, and what it answers to a key is replaced."""
    args, pool = inputs(2, 1, 2, 32, 32, torch.float32, device)
    plain, rows = pool.clone(), torch.tensor([4, 1], device=device)
    g = torch.Generator().manual_seed(3)
    for _ in range(20):
        mixed = torch.randn(args[0].shape, generator=g).to(device)
        found, expected = (
            delta_rule(mixed, *args[1:], pool, rows),
            reference((mixed, *args[1:]), plain, rows),
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("key", "value"), [(24, 32), (32, 24), (8, 16)])
def test_other_sizes_are_left_to_the_plain_code(key, value, device, monkeypatch):
    args, pool = inputs(1, 1, 2, key, value, torch.float32, device)
    monkeypatch.setattr(kernel, "step", lambda *_: pytest.fail("a size that the kernel does not take"))
    assert delta_rule(*args, pool, torch.tensor([0], device=device)).shape == (1, 2, value)


def test_a_padding_row_may_be_named_several_times(device):
    args, pool = inputs(4, 1, 2, 16, 16, torch.float32, device)
    before = pool.clone()
    out = delta_rule(*args, pool, torch.tensor([6, 0, 6, 6], device=device))
    alone = delta_rule(*(x[1:2] for x in args[:3]), *args[3:], before, torch.tensor([0], device=device))
    assert torch.equal(out[1:2], alone) and torch.equal(pool[:6], before[:6])
