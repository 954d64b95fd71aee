from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.errors import FormatError
from tracefp4.formats import e2m1

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nearest(value: float, ties: str) -> int:
    """Code of one float by distance alone, in float64; exact for every float32."""
    size = min(abs(value), 6.0)
    distance = [abs(size - g) for g in GRID]
    best = [k for k, d in enumerate(distance) if d == min(distance)]
    if ties == "even":
        best = [k for k in best if len(best) == 1 or k % 2 == 0]
    code = best[-1] if ties == "up" else best[0]
    return code + 8 * bool(np.signbit(value))


@pytest.mark.parametrize("ties", e2m1.TIES)
def test_every_bfloat16_rounds_to_the_nearest_code(every_bfloat16, ties, device):
    finite = every_bfloat16[~every_bfloat16.isnan()]
    codes = e2m1.encode(finite.to(device), ties).cpu()
    # Values beyond 8 all saturate; computing each by distance would take long and show nothing.
    small = finite.abs() <= 8
    want = torch.tensor([nearest(v, ties) for v in finite[small].tolist()], dtype=torch.uint8)
    assert torch.equal(codes[small], want)
    assert torch.equal(codes[~small], 7 + 8 * torch.signbit(finite[~small]).to(torch.uint8))


@pytest.mark.parametrize("ties", e2m1.TIES)
def test_floats_next_to_every_threshold(ties, device):
    middles = [(a + b) / 2 for a, b in itertools.pairwise(GRID)]
    points = torch.tensor([*GRID, *middles, 7.0, 3.0e38], dtype=torch.float32)
    around = torch.cat([points, torch.nextafter(points, points * 0 - 9), torch.nextafter(points, points * 0 + 9)])
    around = torch.cat([around, -around])
    want = torch.tensor([nearest(v, ties) for v in around.tolist()], dtype=torch.uint8)
    assert torch.equal(e2m1.encode(around.to(device), ties).cpu(), want)


@given(st.floats(width=32, allow_nan=False), st.sampled_from(e2m1.TIES))
def test_any_float(value, ties):
    assert e2m1.encode(torch.tensor([value]), ties).item() == nearest(value, ties)


def test_ties_as_published():
    z = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1.decode(e2m1.encode(z, "even")).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert e2m1.decode(e2m1.encode(z, "down")).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    assert e2m1.decode(e2m1.encode(z, "up")).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]


def test_equals_rounding_by_magic_addition():
    """Adding 2^(e+22) rounds a float to the grid of exponent e and leaves the code in the low bits of the sum."""
    z = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)) * 2
    size = z.abs().clamp(max=6)
    exponent = torch.frexp(size).exponent.sub(1).clamp(min=0)
    low = (size + torch.ldexp(torch.ones_like(size), exponent + 22)).view(torch.int32) & 7
    assert torch.equal(e2m1.encode(z) & 7, (low + 2 * exponent).to(torch.uint8))


def test_not_a_number_infinity_and_the_sign_of_zero():
    z = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, -0.1, 1e-45, -1e-45])
    assert e2m1.encode(z).tolist() == [7, 7, 15, 0, 8, 8, 0, 8]
    assert e2m1.encode(z, negative_zero="strict").tolist() == [7, 7, 15, 0, 0, 8, 0, 8]
    assert e2m1.encode(z, negative_zero="positive").tolist() == [7, 7, 15, 0, 0, 0, 0, 0]
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int64).to(torch.int32)
    assert e2m1.encode(payloads.view(torch.float32)).tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_codes_survive_a_round_trip(dtype):
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.decode(codes, dtype)
    assert values.dtype == dtype
    assert values.tolist() == [*GRID, *(-g for g in GRID)]
    assert torch.equal(e2m1.encode(values.float()), codes)


def test_packing_puts_the_even_index_low():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert e2m1.pack(codes).tolist() == [[0x21, 0x0F]]


@given(st.lists(st.integers(0, 15), max_size=40).filter(lambda v: len(v) % 2 == 0))
def test_unpack_inverts_pack(values):
    codes = torch.tensor(values, dtype=torch.uint8)
    assert torch.equal(e2m1.unpack(e2m1.pack(codes)), codes)


def test_bracket_holds_the_value(every_bfloat16, device):
    z = every_bfloat16[every_bfloat16.abs() <= 6]
    lower, upper = (e2m1.decode(c).cpu() for c in e2m1.bracket(z.to(device)))
    assert torch.all((lower.abs() <= z.abs()) & (z.abs() <= upper.abs()))
    assert torch.equal(torch.signbit(lower), torch.signbit(z))
    assert torch.equal(torch.signbit(upper), torch.signbit(z))
    on_grid = torch.isin(z.abs(), torch.tensor(GRID[:-1]))
    assert torch.equal(lower == upper, on_grid)
    gap = dict(itertools.pairwise(GRID))
    assert all(gap[a] == b for a, b in zip(lower.abs()[~on_grid].tolist(), upper.abs()[~on_grid].tolist(), strict=True))


def test_bracket_at_and_beyond_six():
    lower, upper = e2m1.bracket(torch.tensor([6.0, -6.0, 100.0, float("-inf"), 5.99]))
    assert lower.tolist() == [6, 14, 6, 14, 6]
    assert upper.tolist() == [7, 15, 7, 15, 7]


def test_refusals_say_what_is_wrong():
    with pytest.raises(FormatError, match="float32"):
        e2m1.encode(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(FormatError, match="did you mean 'even'"):
        e2m1.encode(torch.zeros(2), "evne")
    with pytest.raises(FormatError, match="sign of zero"):
        e2m1.encode(torch.zeros(2), negative_zero="never")
    with pytest.raises(FormatError, match="even last axis"):
        e2m1.pack(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(FormatError, match="uint8"):
        e2m1.unpack(torch.zeros(3))


def test_empty_and_strided_inputs():
    assert e2m1.encode(torch.zeros(0, 4)).shape == (0, 4)
    z = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)) * 3
    assert torch.equal(e2m1.encode(z.t()), e2m1.encode(z).t())
    assert torch.equal(e2m1.unpack(e2m1.pack(e2m1.encode(z).t()[:, ::2])), e2m1.encode(z).t()[:, ::2])
