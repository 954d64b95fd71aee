from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.formats import e2m1, e4m3, e8m0
from tracefp4.formats.blocks import product_table

BYTES = torch.arange(256, dtype=torch.uint8)


def e4m3_value(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def test_every_e4m3_byte(device):
    values = e4m3.decode(BYTES.to(device)).cpu()
    for byte, value in enumerate(values.tolist()):
        want = e4m3_value(byte)
        assert value == want or (math.isnan(value) and math.isnan(want))
    finite = BYTES[~values.isnan()]
    assert torch.equal(e4m3.encode(values[~values.isnan()].to(device)).cpu(), finite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_e4m3_bytes_decode_like_few(dtype, device):
    """Large tensors go through a table on a CPU: the same bits, NaNs included."""
    word = torch.int32 if dtype == torch.float32 else torch.int16
    few = torch.stack([e4m3.decode(byte, dtype) for byte in BYTES.to(device)]).view(word)
    many = e4m3.decode(BYTES.to(device).expand(64, 256).t(), dtype)
    assert many.shape == (256, 64)
    assert torch.equal(many.contiguous().view(word), few[:, None].expand(256, 64))


def test_e4m3_rounds_to_nearest_even_and_saturates(device):
    grid = torch.tensor([e4m3_value(b) for b in range(127)], dtype=torch.float64)
    middles = (grid[1:] + grid[:-1]) / 2
    points = torch.cat([grid, middles]).float()
    points = torch.cat([points, torch.nextafter(points, points - 1), torch.nextafter(points, points + 1)])
    points = torch.cat([points[points >= 0], torch.tensor([449.0, 464.0, 1e9, math.inf])])
    distance = (points.double()[:, None].clamp(max=448) - grid).abs()
    best = distance.min(dim=1, keepdim=True).values
    tied = (distance == best).double()
    even = tied * (1 + (torch.arange(127) % 2 == 0))
    want = torch.where(tied.sum(1) > 1, even.argmax(1), tied.argmax(1)).to(torch.uint8)
    assert torch.equal(e4m3.encode(points.to(device)).cpu(), want)
    assert e4m3.encode(torch.tensor([math.nan], device=device)).item() == e4m3.NAN


def test_every_e8m0_byte(device):
    values = e8m0.decode(BYTES.to(device)).cpu()
    assert values[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert values[255].isnan()
    assert torch.equal(e8m0.decode(BYTES, torch.bfloat16)[:255].float(), values[:255])


def e8m0_byte(m: float, rule: str, largest: Fraction, power: int, carry: Fraction) -> int:
    """The definitions of the three rules in exact rational arithmetic."""
    if m == 0:
        return 0
    exact = Fraction(m)
    floor = math.frexp(m)[1] - 1
    if rule == "floor":
        exponent = floor - power
    elif rule == "half":
        exponent = floor + (exact >= carry * Fraction(2) ** floor) - power
    else:
        exponent = floor - power
        while Fraction(2) ** exponent * largest < exact:
            exponent += 1
    return min(max(exponent + 127, 0), 254)


@pytest.mark.parametrize("rule", e8m0.RULES)
@pytest.mark.parametrize(
    ("largest", "power", "ceil_field", "half_field", "carry"),
    [
        (Fraction(6), 2, 0x400000, 0x600000, Fraction(7, 4)),
        (Fraction(448), 8, 0x600000, 0x780000, Fraction(31, 16)),
    ],
)
def test_e8m0_rules(rule, largest, power, ceil_field, half_field, carry, device):
    fields = [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x77FFFF, 0x780000, 0x7FFFFF]
    bits = [(e << 23) | f for e in range(255) for f in fields]
    amax = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    field = half_field if rule == "half" else ceil_field
    got = e8m0.from_amax(amax.to(device), rule, power, field).cpu()
    want = [e8m0_byte(m, rule, largest, power, carry) for m in amax.tolist()]
    # Subnormals of float32 fall below every exponent that the rules can tell apart.
    assert got.tolist() == want


def test_e8m0_of_the_non_finite():
    got = e8m0.from_amax(torch.tensor([math.nan, math.inf, 0.0]), "ceil", 2, 0x400000)
    assert got.tolist() == [255, e8m0.from_amax(torch.tensor([3.4028234663852886e38]), "ceil", 2, 0x400000).item(), 0]


def test_bytes_of_constants():
    assert [e4m3.byte(e4m3_value(b)) for b in range(127)] == list(range(127))
    assert [e8m0.byte(2.0 ** (b - 127)) for b in range(255)] == list(range(255))


@given(st.floats(min_value=2.0**-120, max_value=2.0**125, width=32))
def test_ceil_never_clips_and_floor_never_wastes_an_octave(m):
    ceil = 2.0 ** (e8m0.from_amax(torch.tensor([m]), "ceil", 2, 0x400000).item() - 127)
    floor = 2.0 ** (e8m0.from_amax(torch.tensor([m]), "floor", 2, 0x400000).item() - 127)
    assert 3 < m / ceil <= 6
    assert 4 <= m / floor < 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_e2m1_times_e4m3_is_exact_in_sixteen_bits(dtype, device):
    products = [
        (e4m3_value(byte), value)
        for byte in range(127)
        for value in e2m1.decode(torch.arange(16, dtype=torch.uint8)).tolist()
    ]
    exact = torch.tensor([a * b for a, b in products], dtype=torch.float64)
    assert torch.equal(exact.to(dtype).double(), exact)
    scale = torch.tensor([a for a, _ in products], device=device).to(dtype)
    code = torch.tensor([b for _, b in products], device=device).to(dtype)
    assert torch.equal((scale * code).cpu().double(), exact)
    assert torch.equal(product_table("e4m3", dtype)[: 127 * 16].double(), exact)
    assert exact.abs().unique().numel() == 238  # zero among them


def test_e2m1_times_e8m0_is_exact_in_bfloat16_below_the_overflow():
    table = product_table("e8m0", torch.bfloat16).view(256, 16)
    exact = torch.tensor([[2.0 ** (b - 127) * m for m in e2m1.MAGNITUDES] for b in range(255)], dtype=torch.float64)
    wrong = (table[:255, :8].double() != exact).nonzero().tolist()
    assert wrong == [[253, 6], [253, 7], [254, 4], [254, 5], [254, 6], [254, 7]]
    assert table[255].isnan().all()


def test_ceil_is_the_logarithm_of_sglang_on_every_bfloat16():
    """SGLang writes ``ceil(log2(max(m / 6, 1e-10)))``: ours in fp32; in bfloat16 a tenth of exponents differ."""
    m = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ours = e8m0.from_amax(m.float(), "ceil", 2, 0x400000).clamp(min=e8m0.byte(2.0**-33))
    exact = torch.ceil(torch.log2((m.float() / 6).clamp(min=1e-10))) + 127
    coarse = torch.ceil(torch.log2((m / 6).clamp(min=1e-10))) + 127
    assert torch.equal(exact, ours.float())
    assert 0.05 < (coarse.float() != ours).float().mean().item() < 0.15
