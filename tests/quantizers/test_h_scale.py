"""H-Scale against a search block by block, and against the published shares of changed scales."""

import pytest
import torch

from tracefp4.errors import FormatError
from tracefp4.formats import e4m3
from tracefp4.formats.blocks import Quantized, encode, normalize, quantize_weight
from tracefp4.formats.spec import get_spec
from tracefp4.quantizers.h_scale import quantize_h_scale

WEIGHT = get_spec("nvfp4-w4a4").weights


def data(experts=2, rows=4, width=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(experts, rows, width, generator=g).bfloat16()
    return w, torch.rand(experts, width, generator=g) ** 4


def test_equals_a_search_block_by_block():
    w, h = data()
    q, plain = quantize_h_scale(w, WEIGHT, h), quantize_weight(w, WEIGHT)
    for e in range(2):
        for n in range(4):
            for b in range(4):
                part = slice(16 * b, 16 * b + 16)
                block, g = w[e, n, part][None], plain.global_scale[e]
                usual = int(plain.scales[e, n, b])
                errors = {}
                for byte in range(max(1, usual - 9), min(126, usual + 6) + 1):
                    scales = torch.tensor([[byte]], dtype=torch.uint8)
                    codes = encode(normalize(block, scales, g, WEIGHT), WEIGHT)
                    value = Quantized(codes, scales, g, WEIGHT).dequantize()
                    errors[byte] = float((((value - block.float()) ** 2 * h[e, part]).double()).sum())
                best = min(errors, key=lambda byte: (errors[byte], abs(byte - usual)))
                assert int(q.scales[e, n, b]) == best
                assert torch.equal(
                    q.codes[e, n, part],
                    encode(normalize(block, q.scales[e, n, b].view(1, 1), g, WEIGHT), WEIGHT)[0],
                )


def weighted(w, q, h):
    return float((((q.dequantize() - w.float()) ** 2) * h[:, None]).sum())


def test_the_weighted_error_falls_and_no_block_gets_worse():
    w, h = data(2, 64, 256, seed=1)
    q, plain = quantize_h_scale(w, WEIGHT, h), quantize_weight(w, WEIGHT)
    assert weighted(w, q, h) < 0.8 * weighted(w, plain, h)
    blocks = [((x.dequantize() - w.float()) ** 2 * h[:, None]).unflatten(-1, (-1, 16)).sum(-1) for x in (q, plain)]
    assert (blocks[0] <= blocks[1] * (1 + 1e-5)).all()


def test_shares_of_changed_scales_are_those_that_were_published():
    """arXiv 2608.28113: 31 % unchanged, 48 % larger, 21 % smaller; here with Gaussian weights and level energy."""
    w, _ = data(1, 512, 1024, seed=2)
    q, plain = quantize_h_scale(w, WEIGHT, torch.ones(1, 1024)), quantize_weight(w, WEIGHT)
    unchanged = float((q.scales == plain.scales).float().mean())
    larger = float((q.scales > plain.scales).float().mean())
    assert unchanged == pytest.approx(0.31, abs=0.03)
    assert larger == pytest.approx(0.48, abs=0.03)


def test_zeros_and_the_largest_scale_stay_in_range():
    w, h = data(1, 2, 32)
    w[0, 0] = 0
    q = quantize_h_scale(w, WEIGHT, h[:1, :32])
    assert not q.dequantize()[0, 0].any()
    assert int(q.scales.max()) <= 126 and e4m3.decode(q.scales).isfinite().all()
    # Without any weight the usual scales stay.
    assert torch.equal(quantize_h_scale(w, WEIGHT, torch.zeros(1, 32)).scales, quantize_weight(w, WEIGHT).scales)


def test_refusals():
    w, h = data()
    with pytest.raises(FormatError, match="does not fit weights"):
        quantize_h_scale(w, WEIGHT, h[:, :32])
    with pytest.raises(FormatError, match="does not hold the usual scale"):
        quantize_h_scale(w, WEIGHT, h, (1, 6))
