"""Residual compensation in one pass is, bit for bit, that of the plain code."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.formats.blocks import quantize
from tracefp4.formats.fused import rules
from tracefp4.formats.numerics import NUMERICS, get_numerics
from tracefp4.guidance.codec import pack_bits
from tracefp4.guidance.rounding import Rounding, round_compensated, round_gated_compensated
from tracefp4.quantizers.residual import channels, terms
from tracefp4.rollout.capture import Capture

PRESETS = [replace(n, scope="token") if n.scope == "tensor" else n for n in map(get_numerics, NUMERICS)]
PRESETS.append(replace(get_numerics("sglang-kv-nvfp4"), name="constant", constant=0.3))


def plain(x, n, share, monkeypatch):
    """Codes and both operands without kernels."""
    with monkeypatch.context() as patch:
        patch.setenv("TRACEFP4_KERNELS", "reference")
        q = quantize(x.cpu(), n)
        return (q, *terms(x.cpu(), q, share))


@pytest.mark.parametrize("n", PRESETS, ids=lambda n: n.name)
@pytest.mark.parametrize("kind, width, share", [
    ("normal", 576, 0.3), ("wide", 64, 0.001), ("ties", 192, 0.5), ("edges", 192, 0.02), ("edges", 96, 1.0),
])  # fmt: skip
def test_both_operands(n, kind, width, share, device, make_values, same, monkeypatch):
    from tracefp4.kernels.residual import compensate

    x = make_values(8, width, kind, 3)
    q, first, second = plain(x, n, share, monkeypatch)
    assert second.any() and not second.all()
    found, other = compensate(x.to(device), rules(n), channels(share, width), bits=2)
    assert same(found.operand, first) and same(other, second)
    assert same(found.scales, q.scales) and same(found.planes, pack_bits(q.codes, 2))
    for one, expected in ((found.global_scale, q.global_scale), (found.decode, q.decode_scale())):
        if n.scope == "token":
            assert same(one, expected)
        else:
            assert one is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil"])
def test_other_dtypes_and_rows_with_gaps(name, dtype, device, make_values, same, monkeypatch):
    from tracefp4.kernels.residual import compensate

    n, x = get_numerics(name), make_values(5, 192, "normal", 4, dtype)
    view = torch.cat([x, x], -1).to(device)[:, :192]
    _, first, second = plain(x, n, 0.5, monkeypatch)
    found, other = compensate(view, rules(n), 96)
    assert same(found.operand, first) and same(other, second) and found.planes is None


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil"])
def test_a_nan_is_as_large_as_any_other(name, device, make_values, same, monkeypatch):
    """Two blocks become NaN; the second terms are all in the first of them, whatever the bits of a NaN."""
    from tracefp4.kernels.residual import compensate

    n, x = get_numerics(name), make_values(2, 96, "normal", 6, torch.float32)
    x[0, 3], x.view(torch.int32)[0, 40] = float("nan"), 0x7FFFFFFF
    _, first, second = plain(x, n, 8 / 96, monkeypatch)
    found, other = compensate(x.to(device), rules(n), 8)
    assert same(found.operand, first) and same(other, second)
    assert other[0, : n.block].isnan().all() and not other[0, n.block :].any()


@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64])
def test_of_level_channels_the_first_count(count, device, same, monkeypatch):
    """Every second channel misses 0.25, channel 40 misses more, the others nothing."""
    from tracefp4.kernels.residual import compensate

    n, x = get_numerics("mxfp4-ceil"), torch.zeros(2, 64)
    x[0, ::32], x[0, 1::2], x[0, 40] = 6.0, 0.25, 5.25
    _, first, second = plain(x.bfloat16(), n, count / 64, monkeypatch)
    found, other = compensate(x.bfloat16().to(device), rules(n), count)
    assert same(found.operand, first) and same(other, second)
    kept = {channel for channel in range(64) if other[0, channel] != 0}
    assert kept == {40, *range(1, 64, 2)[: count - 1]} and not other[1].any()


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil"])
def test_after_a_gate(name, device, make_values, same, monkeypatch):
    n, x = get_numerics(name), torch.cat([make_values(5, 96, "wide", seed) for seed in (3, 4)], dim=-1)
    found = round_gated_compensated(x.to(device), n, 0.5, 1)
    assert found is not None
    gate, up = x.to(device).chunk(2, -1)
    h = (torch.nn.functional.silu(gate) * up).cpu()
    q, first, second = plain(h, n, 0.5, monkeypatch)
    assert same(found.factor(), first) and same(found.second, second) and same(found.planes, pack_bits(q.codes, 1))
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    assert round_gated_compensated(x.to(device), n, 0.5, 1) is None


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil"])
def test_what_is_recorded_is_the_first_rounding(name, gated, device, make_values, same):
    n, slots = get_numerics(name), torch.tensor([7, 0, 3], device=device)
    tickets = torch.tensor([1, 2**31 - 1, 0x01020304], dtype=torch.int32, device=device)
    layout = SimpleNamespace(moe_layers=(), num_experts=4, top_k=2)
    shape = SiteShape(Site(0, Kind.EXPERTS_MID), 2, 96, n.block, n.scope == "token")
    found, expected = (Capture(layout, (shape,), 2, 9, device) for _ in range(2))
    x = make_values(6, 192 if gated else 96, "wide").to(device)
    rounded = round_gated_compensated if gated else round_compensated
    one = rounded(x, n, 0.5, 2, place=found.place(shape.site, slots, tickets))
    other = rounded(x, n, 0.5, 2)
    assert one.planes is None and same(one.second, other.second)
    expected.write(shape.site, other, slots, tickets, None)
    assert same(found._rows, expected._rows) and found._rows[slots].any(-1).all()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4-te"])
def test_where_there_is_no_kernel(name, device, make_values, same, monkeypatch):
    """The plain code gives both operands too: rows that are too long, no kernels at all."""
    from tracefp4.kernels import residual

    n, x = get_numerics(name), make_values(4, 96, "normal", 5)
    monkeypatch.setattr(residual, "WIDTH_LIMIT", 64)
    found = round_compensated(x.to(device), n, 0.5, 1)
    q, first, second = plain(x, n, 0.5, monkeypatch)
    assert isinstance(found, Rounding) and same(found.factor(), first) and same(found.second, second)
    assert same(found.planes, pack_bits(q.codes, 1))
