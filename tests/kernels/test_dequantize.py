"""Widening packed codes in one pass equals unpacking them and the plain code, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tracefp4.formats.blocks import quantize, quantize_weight
from tracefp4.formats.numerics import get_numerics
from tracefp4.formats.packed import Packed
from tracefp4.formats.spec import get_spec

NUMERICS = ["nvfp4-te", "nvfp4-pow2", "mxfp4-ceil", "sglang-kv-nvfp4"]


@pytest.mark.parametrize("kind", ["wide", "edges"])
@pytest.mark.parametrize("name", NUMERICS)
def test_operands_and_values(name, kind, device, make_values, same, monkeypatch):
    n = get_numerics(name)
    x = make_values(9, 96, kind)
    packed = Packed.of(quantize(x.to(device), n))
    scale = quantize(x.to(device), n).decode_scale()
    found = [packed.operand(), packed.operand(torch.float32), packed.values(scale, torch.bfloat16)]
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    expected = quantize(x, n)
    assert same(found[0], expected.operand())
    assert same(found[1], expected._scaled(torch.float32))
    assert same(found[2], expected.dequantize(torch.bfloat16))


def test_weights_have_one_factor_for_many_blocks(device, make_values, same, monkeypatch):
    n = get_spec("nvfp4-w4a4-kv4").weights
    w = make_values(6 * 40, 64, "wide").view(6, 40, 64)
    q = quantize_weight(w.to(device), n)
    found = Packed.of(q).values(q.decode_scale(), torch.bfloat16)
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    assert same(found, quantize_weight(w, n).dequantize(torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 127, 130])
def test_no_block_is_left_out_or_written_past_the_end(rows, device, same):
    n = get_numerics("nvfp4-te")
    codes = torch.randint(0, 256, (rows, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    scales = torch.randint(1, 127, (rows, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    plain = Packed(codes, scales, n)
    expected = plain.operand() if device.type == "cuda" else None
    found = Packed(codes.to(device), scales.to(device), n).operand()
    if expected is None:
        low, high = codes & 15, codes >> 4
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = torch.cat([table, -table])
        values = table[torch.stack([low, high], -1).flatten(-2).long()]
        expected = (values.view(rows, 3, 16) * scales.view(torch.float8_e4m3fn).float()[..., None]).view(rows, 48)
        expected = expected.bfloat16()
    assert same(found, expected)
