"""The fused quantizer writes what the plain code computes, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tracefp4.formats import blocks, e2m1, e4m3
from tracefp4.formats.fused import rules
from tracefp4.formats.numerics import NUMERICS, get_numerics
from tracefp4.guidance.codec import pack_bits

pytestmark = pytest.mark.usefixtures("plain_code")


def packs(n):
    return n.element == "e2m1"


def by_row(name):
    n = get_numerics(name)
    return replace(n, scope="token") if n.scope == "tensor" else n


def check(found, expected, same, bits=0):
    assert same(found.scales, expected.scales)
    if expected.global_scale is not None:
        assert same(found.global_scale, expected.global_scale)
    if found.codes is not None:
        assert same(found.codes, expected.codes)
    if found.packed is not None:
        assert same(found.packed, e2m1.pack(expected.codes))
    if found.operand is not None:
        assert same(found.operand, expected.operand())
    if found.values is not None:
        assert same(found.values, expected.dequantize(found.values.dtype))
    if found.planes is not None:
        assert same(found.planes, pack_bits(expected.codes, bits))


@pytest.mark.parametrize("name", NUMERICS)
@pytest.mark.parametrize("kind", ["normal", "wide", "ties", "edges"])
def test_equals_the_plain_code(name, kind, device, make_values, same):
    from tracefp4.kernels.quantize import quantize

    n = by_row(name)
    for width in (96,):
        x = make_values(7, width, kind, seed=width)
        expected = blocks.quantize(x, n)
        options = {"codes": True, "packed": packs(n), "operand": True, "values": torch.bfloat16, "bits": 3}
        check(quantize(x.to(device), rules(n), **options), expected, same, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-pow2", "mxfp4-ceil", "mxfp8"])
def test_other_dtypes(name, dtype, device, make_values, same):
    from tracefp4.kernels.quantize import quantize

    x = make_values(7, 128, "normal", 3, dtype)
    expected = blocks.quantize(x, get_numerics(name))
    check(quantize(x.to(device), rules(get_numerics(name)), codes=True, values=dtype), expected, same)


@pytest.mark.parametrize("negative_zero", ["keep", "strict", "positive"])
@pytest.mark.parametrize("ties", ["even", "up", "down"])
def test_every_class_of_floats(ties, negative_zero, device, same):
    """All bfloat16 values as normalised values: block scale 1, so that what is rounded is the value itself."""
    from tracefp4.kernels.quantize import quantize

    n = replace(get_numerics("sglang-kv-nvfp4"), ties=ties, negative_zero=negative_zero)
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.abs() <= 6]
    x = torch.nn.functional.pad(x[: x.numel() // 15 * 15].view(-1, 15), (0, 1), value=6.0)
    check(quantize(x.to(device), rules(n), codes=True), blocks.quantize(x, n), same)


def test_every_class_of_floats_in_eight_bits(device, same):
    """The same of E4M3 elements, and beside each value its neighbours in float32: around ties, subnormals, and 448."""
    from tracefp4.kernels.quantize import quantize

    n = get_numerics("mxfp8")
    x = torch.arange(1 << 16, dtype=torch.int32).bitwise_left_shift(16)
    x = torch.stack([x - 1, x, x + 1]).view(torch.float32).flatten()
    x = x[x.abs() <= 448]
    x = torch.nn.functional.pad(x[: x.numel() // 31 * 31].view(-1, 31), (0, 1), value=448.0)
    expected = blocks.quantize(x, n)
    assert (expected.scales == 127).all() and same(expected.codes, e4m3.encode(x))
    found = quantize(x.to(device), rules(n), codes=True, operand=True, bits=4)
    check(found, expected, same, 4)
    assert found.codes.unique().numel() == 254  # all but the two NaN


@pytest.mark.parametrize("rule", ["ceil", "floor", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eight_bits_of_any_magnitude(rule, dtype, device, same):
    """Blocks around every power of two that the dtype holds, and blocks of arbitrary bits: ties, clips, overflow."""
    from tracefp4.kernels.quantize import quantize

    n = replace(get_numerics("mxfp8"), scale_rule=rule)
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(300, 32, generator=generator).exp2() * torch.randn(300, 32, generator=generator)
    wide = (wide.double() * torch.arange(-160, 140).double()[:, None].exp2()).to(dtype)
    kind = torch.int32 if dtype is torch.float32 else torch.int16
    bits = torch.iinfo(kind)
    wild = torch.randint(bits.min, bits.max, (300, 32), dtype=kind, generator=generator).view(dtype)
    x = torch.cat([wide, wild]).view(-1, 96)
    expected = blocks.quantize(x, n)
    check(quantize(x.to(device), rules(n), codes=True, operand=True, values=dtype, bits=1), expected, same, 1)


def test_given_global_scales(device, make_values, same):
    from tracefp4.kernels.quantize import quantize

    n = replace(get_numerics("nvfp4-te"), scope="tensor")
    w = make_values(12, 2112, "wide", 5).view(3, 4, 2112)
    expected = blocks.quantize_weight(w, n)
    found = quantize(w.to(device), rules(n), expected.global_scale.to(device), packed=True, operand=True)
    check(found, expected, same)


@pytest.mark.parametrize("name", [name for name in NUMERICS if get_numerics(name).scope != "none"])
@pytest.mark.parametrize("kind", ["normal", "wide", "edges"])
def test_global_scales_of_many_rows(name, kind, device, make_values, same, monkeypatch):
    """Joined and by rows, contiguous and strided; a NaN and an infinity among them."""
    from tracefp4.kernels import quantize as kernel

    n = replace(get_numerics(name), scope="tensor")
    x = make_values(12, 2112, kind, 5)
    for limit in (kernel.GRID_LIMIT, 0):
        monkeypatch.setattr(kernel, "GRID_LIMIT", limit)
        for part in (x.view(3, 4, 2112), x.view(3, 4, 2112)[:, 1:, 16:208], x.view(4, 3, 2112).transpose(0, 1)):
            for per, groups in ((0, 1), (1, 3)):
                expected = blocks.global_scale(part, n, per=per)
                found = kernel.global_scales(part.to(device), rules(n), groups)
                assert same(found, expected.reshape(-1))


def test_strided_rows(device, make_values, same):
    from tracefp4.kernels.quantize import quantize

    n = get_numerics("nvfp4-te")
    x = make_values(10, 128, "normal", 7)
    for part in (x[:, 32:96], x.view(5, 2, 128)[:, 1:, 16:80], x.view(5, 2, 128).transpose(0, 1)):
        check(quantize(part.to(device), rules(n), codes=True, bits=1), blocks.quantize(part, n), same, 1)


@pytest.mark.parametrize("width", [16, 128, 768, 2048, 2880, 4096])
@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil", "mxfp8"])
def test_every_tile(name, width, device, make_values, same):
    """Every tile size that a launch can choose: a compiler once zeroed half the blocks of one of them."""
    n = get_numerics(name)
    if width % n.block:
        pytest.skip("not a multiple of the block")
    # Few rows and many take different numbers of warps.
    x = make_values(3, width, "wide", 11).repeat(200 if device.type == "cuda" else 1, 1)
    for rows in {3, x.shape[0]}:
        check_tile(x[:rows], n, device, same)


def check_tile(x, n, device, same):
    from tracefp4.kernels.quantize import quantize

    assert x.count_nonzero() > 0.99 * x.numel()
    found = quantize(x.to(device), rules(n), codes=True, packed=packs(n), operand=True, bits=4)
    check(found, blocks.quantize(x, n), same, 4)


@pytest.mark.parametrize("limit", [0, 65535])
def test_rows_are_joined_only_where_a_grid_holds_their_pieces(limit, device, make_values, same, monkeypatch):
    from tracefp4.kernels import quantize as kernel

    monkeypatch.setattr(kernel, "GRID_LIMIT", limit)
    n = get_numerics("mxfp4-ceil")
    x = make_values(12, 96, "normal", 13).view(3, 4, 96)
    assert kernel.joins_rows(x, rules(n)) == (limit > 0)
    check(kernel.quantize(x.to(device), rules(n), codes=True, packed=True), blocks.quantize(x, n), same)


def test_experts_of_a_large_model_exceed_a_grid_of_one_row():
    from tracefp4.kernels.quantize import joins_rows

    made = rules(get_numerics("mxfp4-ceil"))
    assert not joins_rows(torch.empty(128, 1536, 2048, dtype=torch.bfloat16, device="meta"), made)
    assert joins_rows(torch.empty(128, 256, 2048, dtype=torch.bfloat16, device="meta"), made)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_weights_of_a_large_layer(same, monkeypatch):
    monkeypatch.delenv("TRACEFP4_KERNELS")
    n = get_numerics("mxfp4-ceil")
    w = torch.randn(128, 1536, 2048, device="cuda", dtype=torch.bfloat16)
    q = blocks.quantize_weight(w, n)
    for expert in (0, 64, 127):
        expected = blocks.quantize(w[expert].cpu(), n)
        assert same(q.codes[expert], expected.codes) and same(q.scales[expert], expected.scales)


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-pow2", "mxfp4-ceil", "mxfp8"])
@pytest.mark.parametrize("width, kind", [(96, "edges"), (128, "wide"), (768, "normal")])
def test_gate_and_quantization_in_one_pass(name, width, kind, device, make_values, same):
    """As the eager code rounds: SiLU to the dtype, the product to the dtype, then codes."""
    from tracefp4.kernels.quantize import quantize

    n = get_numerics(name)
    x = torch.cat([make_values(7, width, kind, seed) for seed in (1, 2)], dim=-1).to(device)
    if device.type == "cuda":
        x = x.repeat(1300 if width == 96 else 300, 1)  # many rows take fewer warps each
    for rows in {7, min(700, x.shape[0]), x.shape[0]}:
        part = x[:rows]
        gate, up = part.chunk(2, -1)
        expected = blocks.quantize((torch.nn.functional.silu(gate) * up).cpu(), n)
        found = quantize(part, rules(n), gated=True, codes=True, packed=packs(n), operand=True, bits=2, decode=True)
        check(found, expected, same, 2)
        if n.token_scale:
            assert same(found.decode, expected.decode_scale())


def test_gate_of_every_bfloat16(device, same):
    """SiLU of all finite values times one or another: rounded where the eager code rounds, by the same exponential."""
    from tracefp4.kernels.gate import gate

    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(x.isfinite(), x, 0.0).view(32, 2048).to(device)
    for up in (torch.ones_like(x), x.flip(0)):
        assert same(gate(torch.cat([x, up], dim=-1)), torch.nn.functional.silu(x) * up)
