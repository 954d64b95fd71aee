"""Guided rounding from packed guidance equals unpacking and the plain code, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.formats import blocks, e4m3
from tracefp4.formats.fused import has_kernel, rules
from tracefp4.formats.numerics import get_numerics
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.codec import pack_bits, pack_scales, unpack_bits
from tracefp4.guidance.record import SiteRecord
from tracefp4.guidance.rounding import nearest_planes
from tracefp4.kernels.runtime import SWITCH
from tracefp4.quantizers.guided import Outcome, choose, choose_eight, nearest_codes, quantize_guided

pytestmark = pytest.mark.usefixtures("plain_code")

NAMES = ["nvfp4-te", "nvfp4-pow2", "nvfp4-modelopt", "sglang-kv-nvfp4", "mxfp4-ceil", "sglang-kv-mx"]
EIGHT = list(zip(["mxfp8"] * 4, (1, 2, 3, 4), (8, 3, 2, 8), strict=True))


def recorded(x, n, bits, scale_bits):
    """Packed outcome of a rollout whose values were slightly different, and the same unpacked."""
    noisy = (x.float() * (1 + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9)))).to(x.dtype)
    q = blocks.quantize(noisy, n)
    low = q.codes & ((1 << bits) - 1)
    scales = q.scales if scale_bits == 8 else q.scales & ((1 << scale_bits) - 1)
    outcome = Outcome(low, scales, q.global_scale, bits, scale_bits)
    return pack_bits(q.codes, bits), pack_scales(q.scales, scale_bits), outcome


def run(x, n, packed, outcome, device, **options):
    from tracefp4.kernels import guided

    planes, scales = (t.to(device) for t in packed)
    g = None if outcome.global_scale is None else outcome.global_scale.to(device)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return guided.quantize_guided(
        x.to(device), rules(n), planes, scales, g, bits=outcome.bits, scale_bits=outcome.scale_bits,
        codes=True, operand=True, values=torch.bfloat16, **options,
    )  # fmt: skip


def cases():
    """Each numerics, each number of bits and each of scale bits once by default; all of them with -m slow."""
    quick = {*zip(NAMES, (1, 2, 3, 4, 1, 2), (8, 3, 2, 8, 3, 2), strict=True), *EIGHT}
    for case in itertools.product([*NAMES, "mxfp8"], (1, 2, 3, 4), (8, 3, 2)):
        yield pytest.param(*case, marks=[] if case in quick or torch.cuda.is_available() else [pytest.mark.slow])


@pytest.mark.parametrize("name, bits, scale_bits", list(cases()))
def test_equals_the_plain_code(name, bits, scale_bits, device, make_values, same):
    n = get_numerics(name)
    for kind in ("wide", "edges"):
        x = make_values(7, 96, kind, seed=bits)
        *packed, outcome = recorded(x.nan_to_num(0.5, 3.0, -3.0), n, bits, scale_bits)
        expected = quantize_guided(x, outcome, n)
        found = run(x, n, packed, outcome, device)
        assert same(found.codes, expected.codes)
        assert same(found.scales, expected.scales)
        assert same(found.operand, expected.operand())
        assert same(found.values, expected.dequantize(torch.bfloat16))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_every_value_under_every_outcome(bits, device, same):
    n = replace(get_numerics("sglang-kv-nvfp4"))
    z = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    small = z.float().abs()
    z = z[(small < 8) & ((small > 2.0**-20) | (small < 2.0**-126))]  # subnormals, which a GPU could take for 0
    x = torch.nn.functional.pad(z, (0, -z.numel() % 4096)).view(-1, 4096)
    scales = torch.full((len(x), 256), 0x38, dtype=torch.uint8)  # 1.0
    for low in range(1 << bits):
        outcome = Outcome(torch.full(x.shape, low, dtype=torch.uint8), scales, None, bits)
        found = run(x, n, (pack_bits(outcome.low, bits), scales), outcome, device)
        codes = choose(x.float().clamp(-6, 6), outcome.low, bits)
        assert same(found.codes, codes)
        assert same(found.operand, blocks.Quantized(codes, scales, None, n).operand())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_every_value_of_eight_bits_under_every_outcome(bits, device, same):
    """Beside each bfloat16 its neighbours in float32; and the same of what two candidates are as near to."""
    n = get_numerics("mxfp8")
    z = torch.arange(1 << 16, dtype=torch.int32).bitwise_left_shift(16)
    values = e4m3.decode(torch.arange(127, dtype=torch.uint8))
    middles = torch.cat([(values[step:] + values[:-step]) / 2 for step in (2, 4, 8, 16)]).view(torch.int32)
    z = torch.cat([z - 1, z, z + 1, middles - 1, middles, middles + 1]).view(torch.float32)
    z = z[(z.abs() < 512) & ((z.abs() > 2.0**-12) | (z.view(torch.int32) & 0xFFFF == 0))]
    x = torch.nn.functional.pad(z, (0, -z.numel() % 4096)).view(-1, 4096)
    scales = torch.full((len(x), 128), 127, dtype=torch.uint8)  # 1.0
    for low in range(1 << bits):
        outcome = Outcome(torch.full(x.shape, low, dtype=torch.uint8), scales, None, bits)
        found = run(x, n, (pack_bits(outcome.low, bits), scales), outcome, device)
        codes = choose_eight(x.clamp(-448, 448), outcome.low, bits)
        assert same(found.codes, codes)
        assert same(found.operand, blocks.Quantized(codes, scales, None, n).operand())


@pytest.mark.parametrize("spec, bits, scale_bits", [("nvfp4-w4a4-kv4", 1, 2), ("mxfp4-w4a4-kv4", 2, 8)])
def test_vectors_that_share_no_scale_are_one_long_row(spec, bits, scale_bits, device, make_values, same):
    """Of 64 values, so a program has many, and the last one fewer than the others."""
    n = get_spec(spec).kv
    x = make_values(53, 64, "wide", seed=8)
    *packed, outcome = recorded(x, n, bits, scale_bits)
    expected = quantize_guided(x, outcome, n)
    with_gaps = torch.nn.functional.pad(x, (0, 64)).to(device)[:, :64]
    for found in (run(x, n, packed, outcome, device), run(with_gaps, n, packed, outcome, device)):
        assert same(found.codes, expected.codes)
        assert same(found.scales, expected.scales)
        assert same(found.values, expected.dequantize(torch.bfloat16))


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil", "sglang-kv-nvfp4", "mxfp8"])
def test_rows_in_another_order_and_rows_without_guidance(name, device, make_values, same):
    n, vectors = get_numerics(name), 2
    x = make_values(12, 64, "wide", 4)
    planes, scales, outcome = recorded(x, n, 1, 8)
    valid = torch.tensor([True, False, True, True, False, True])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    found = run(x[order], n, (planes, scales), outcome, device, rows=order, valid=valid, vectors=vectors)
    guided, own = quantize_guided(x, outcome, n), blocks.quantize(x, n)
    pick = valid.repeat_interleave(vectors)[:, None]
    assert same(found.codes, torch.where(pick, guided.codes, own.codes)[order])
    assert same(found.scales, torch.where(pick, guided.scales, own.scales)[order])
    if own.global_scale is not None:
        assert same(found.global_scale, torch.where(pick, guided.global_scale, own.global_scale)[order])


@pytest.mark.parametrize(
    "name, scale_bits", list(zip([*NAMES, "mxfp8", "mxfp8"], (8, 3, 2, 8, 3, 2, 8, 2), strict=True))
)
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_bits_of_the_nearest_codes_at_recorded_scales(name, scale_bits, bits, device, make_values, same, monkeypatch):
    n = get_numerics(name)
    for kind in ("wide", "ties", "edges"):
        x = make_values(8, 96, kind, seed=bits)
        planes, scales, outcome = recorded(x.nan_to_num(0.5, 3.0, -3.0), n, bits, scale_bits)
        g = None if outcome.global_scale is None else outcome.global_scale.view(4, 2)
        shape = SiteShape(Site(0, Kind.K), 2, 96, n.block, n.scope == "token")
        record = SiteRecord(shape, planes.view(4, 2, -1)[..., :0], scales.view(4, 2, -1), g, None, scale_bits)
        expected = pack_bits(nearest_codes(x, outcome, n), bits)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
        there, there_x = record.to(device), x.to(device)
        with monkeypatch.context() as patch:
            patch.setenv(SWITCH, "triton")
            assert has_kernel(there_x, n)
            assert same(nearest_planes(there_x, there, n, None, bits), expected)
            assert same(nearest_planes(x[order].to(device), there, n, order.to(device), bits), expected[order])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [8, 48, 2048, 4104])
def test_planes(bits, width, device, same):
    from tracefp4.kernels import planes

    low = torch.randint(0, 256, (2, 3, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    packed = pack_bits(low, bits)
    assert same(planes.pack(low.to(device), bits), packed)
    assert same(planes.unpack(packed.to(device), bits, width), unpack_bits(packed, bits, width))


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-pow2", "mxfp4-ceil", "mxfp8"])
@pytest.mark.parametrize("partial", [False, True])
def test_gate_in_the_same_pass(name, partial, device, make_values, same):
    from tracefp4.kernels.gate import gate

    n = get_numerics(name)
    x = make_values(7, 192, "wide", 5)
    h = gate(x.to(device))
    *packed, outcome = recorded(h.cpu(), n, 1, 8)
    options = {"valid": torch.arange(7) % 3 > 0} if partial else {}
    alone = run(h, n, packed, outcome, device, **options)
    found = run(x, n, packed, outcome, device, gated=True, **options)
    for part in ("codes", "scales", "operand", "values"):
        assert same(getattr(found, part), getattr(alone, part))
    if n.scope == "token":
        expected = blocks.Quantized(found.codes, found.scales, found.global_scale, n).decode_scale()
        assert same(found.decode, expected)
    else:
        assert found.decode is None
