"""The public functions give the same bits whether a kernel or the plain code computes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import FormatError
from tracefp4.formats import blocks
from tracefp4.formats.fused import has_kernel
from tracefp4.formats.numerics import get_numerics
from tracefp4.formats.packed import quantize_packed
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.codec import pack_bits, unpack_bits
from tracefp4.guidance.record import SiteRecord
from tracefp4.guidance.rounding import round_gated, round_nearest, round_recorded
from tracefp4.models.packing import pack_weight
from tracefp4.quantizers.guided import quantize_guided


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-ct", "sglang-kv-nvfp4", "mxfp4-ceil", "mxfp8"])
def test_quantize(name, device, make_values, same, monkeypatch):
    n = get_numerics(name)
    x = make_values(7, 96, "edges", 2)
    found = blocks.quantize(x.to(device), n)
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    expected = blocks.quantize(x, n)
    assert same(found.codes, expected.codes) and same(found.scales, expected.scales)
    assert (found.global_scale is None) == (expected.global_scale is None)
    if expected.global_scale is not None:
        assert same(found.global_scale, expected.global_scale)
    planes = pack_bits(found.codes & 15, 2)
    assert same(unpack_bits(planes, 2, 96), expected.codes & 3)


def test_weights(device, make_values, same, monkeypatch):
    n = replace(get_numerics("nvfp4-te"), scope="tensor")
    w = make_values(12, 96, "wide").view(3, 4, 96)
    found = blocks.quantize_weight(w.to(device), n)
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    expected = blocks.quantize_weight(w, n)
    assert same(found.codes, expected.codes) and same(found.global_scale, expected.global_scale)


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-pow2", "nvfp4-modelopt", "mxfp4-ceil"])
@pytest.mark.parametrize("kind", ["wide", "edges"])
@pytest.mark.parametrize("transposed", [False, True])
def test_packed_weights(name, kind, transposed, device, make_values, same, monkeypatch):
    """Two codes a byte straight from the values are the plain code's, with its scales, expert by expert."""
    numerics = get_spec("mxfp4-w4a4-kv4" if name.startswith("mx") else "nvfp4-w4a4", name).weights
    w = make_values(32 * 3, 96, kind, 4).view(3, 32, 96)
    found = pack_weight(w.to(device), numerics, transposed=transposed)
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    expected = pack_weight(w, numerics, transposed=transposed)
    for one, other in zip(found.parts(), expected.parts(), strict=True):
        assert same(one, other)


def test_eight_bits_are_not_packed(device, make_values, monkeypatch):
    n, x = get_numerics("mxfp8"), make_values(2, 64).to(device)
    assert has_kernel(x, n)
    for choice in ("triton", "reference"):
        monkeypatch.setenv("TRACEFP4_KERNELS", choice)
        for pack in (quantize_packed, lambda x, n: round_nearest(x, n, pack=True)):
            with pytest.raises(FormatError, match="only E2M1 codes fit two a byte"):
                pack(x, n)


def test_eight_bits_under_scales_of_e4m3_have_no_kernel(device, make_values):
    n, x = replace(get_numerics("nvfp4-te"), element="e4m3"), make_values(2, 64).to(device)
    assert not has_kernel(x, n)
    assert blocks.quantize(x, n).codes.max() > 15


@pytest.mark.parametrize("name, scale_bits", [("nvfp4-te", 8), ("nvfp4-te", 3), ("mxfp8", 8), ("mxfp8", 2)])
def test_a_rollout_and_a_trainer_that_follows_it(name, scale_bits, device, make_values, same, monkeypatch):
    def equal(one, other):
        return one is other is None or same(one, other)

    n = get_numerics(name)
    x = make_values(12, 96, "wide", 4)
    theirs = round_nearest(x.to(device), n, bits=1)
    shape = SiteShape(Site(0, Kind.EXPERTS_MID), 2, 96, n.block, n.token_scale)
    with monkeypatch.context() as patch:
        patch.setenv("TRACEFP4_KERNELS", "reference")
        expected = blocks.quantize(x, n)
    assert same(theirs.operand, expected.operand())
    assert equal(theirs.decode_scale(), expected.decode_scale())
    record = SiteRecord.pack(
        shape,
        expected.codes.view(6, 2, 96),
        expected.scales.view(6, 2, -1),
        None if expected.global_scale is None else expected.global_scale.view(6, 2),
        1,
        scale_bits,
    )
    assert same(theirs.planes, record.planes.flatten(0, 1))
    mine = (x.float() * 1.02).bfloat16()
    valid = torch.tensor([True, True, False, True, True, True])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    for mask in (None, valid):
        found = round_recorded(
            mine[order].to(device), record.to(device), n, order.to(device), None if mask is None else mask.to(device)
        )
        assert found is not None
        monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
        guided, own = quantize_guided(mine, record.outcome(), n), blocks.quantize(mine, n)
        monkeypatch.delenv("TRACEFP4_KERNELS")
        pick = torch.ones(12, 1, dtype=torch.bool) if mask is None else mask.repeat_interleave(2)[:, None]
        assert same(found.operand, torch.where(pick, guided.operand(), own.operand())[order])
        scales = guided.decode_scale(), own.decode_scale()
        assert equal(found.decode_scale(), None if None in scales else torch.where(pick, *scales)[order])


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-pow2", "mxfp4-ceil", "mxfp8"])
def test_round_gated(name, device, make_values, same, monkeypatch):
    """What an engine hands to the second product: the same whether gate and rounding are one pass or three."""
    n = get_numerics(name)
    x = torch.cat([make_values(5, 96, "wide", seed) for seed in (3, 4)], dim=-1)
    found = round_gated(x.to(device), n, 2)
    assert found is not None
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    assert round_gated(x.to(device), n, 2) is None
    gate, up = x.to(device).chunk(2, -1)
    expected = round_nearest((torch.nn.functional.silu(gate) * up).cpu(), n, 2)
    assert same(found.factor(), expected.factor()) and same(found.scales, expected.scales)
    assert found.planes is not None and expected.planes is not None and same(found.planes, expected.planes)
    scale, wanted = found.decode_scale(), expected.decode_scale()
    assert (scale is None) == (wanted is None) and (scale is None or same(scale, wanted))
