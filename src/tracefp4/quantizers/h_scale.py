"""H-Scale: block scales that cost the layer's output least.

The usual block scale brings the largest weight to 6. Nothing says that this is best: a larger one rounds the rest of
the block to a coarser grid at other places, a smaller one clips the largest and is finer for all others. H-Scale
(arXiv 2608.28113) tries 16 neighbouring E4M3 scales for each block, from nine codes below the usual one to six above,
rounds the block anew under each, and keeps the scale with the least

    sum over the block of  h_k (w_k - w_hat_k)^2,        h = diag(X^T X)

the diagonal of the layer's Hessian: ``h_k`` is the energy of input channel ``k`` on calibration data, so an error
counts as much as it changes the output. Of equal scales the one nearest to the usual one is kept. The result is an
ordinary NVFP4 tensor. Weights only; activations are quantized as they come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.blocks import Quantized, block_scales, clear_zero_blocks, encode, global_scale, normalize
from tracefp4.formats.numerics import Numerics
from tracefp4.quantizers.four_over_six import check_weight, join

WINDOW = (-9, 6)
"""Codes around the usual scale."""
_LARGEST = 126


def quantize_h_scale(w: Tensor, numerics: Numerics, importance: Tensor, window: tuple[int, int] = WINDOW) -> Quantized:
    """Quantize stacked weights, one global scale a leading index.

    Args:
        w: ``(E, N, K)`` bfloat16 or float32.
        numerics: NVFP4 weight numerics (scope ``tensor``).
        importance: ``(E, K)`` float32, not negative: the energy of each input channel.
        window: lowest and highest code to try, relative to the usual one.

    Raises:
        FormatError: other numerics or shapes, or a window that does not hold 0.
    """
    check_weight(w, numerics)
    if tuple(importance.shape) != (w.shape[0], w.shape[2]):
        raise FormatError(f"importance {tuple(importance.shape)} does not fit weights {tuple(w.shape)}")
    if not window[0] <= 0 <= window[1]:
        raise FormatError(f"the window {window} does not hold the usual scale, 0")
    parts = [_quantize(w[e : e + 1], numerics, importance[e : e + 1], window) for e in range(w.shape[0])]
    return join(parts, numerics)


def _quantize(w: Tensor, numerics: Numerics, importance: Tensor, window: tuple[int, int]) -> Quantized:
    g = global_scale(w, numerics, per=1)
    usual = block_scales(w, g, numerics)
    h = importance.float()[:, None]
    best = least = None
    for step in sorted(range(window[0], window[1] + 1), key=abs):
        tried = (usual.to(torch.int16) + step).clamp_(1, _LARGEST).to(torch.uint8)
        # A block of zeros, and one that holds a NaN, keep what they have.
        tried = torch.where((usual == 0) | (usual > _LARGEST), usual, tried)
        codes = encode(normalize(w, tried, g, numerics), numerics)
        q = Quantized(clear_zero_blocks(codes, tried, numerics), tried, g, numerics)
        error = (q.dequantize() - w.float()).square() * h
        total = error.unflatten(-1, (-1, numerics.block)).sum(-1, dtype=torch.float64)
        if best is None or least is None:
            best, least = q, total
            continue
        better = total < least
        least = torch.where(better, total, least)
        wide = better.repeat_interleave(numerics.block, dim=-1)
        best = Quantized(
            torch.where(wide, q.codes, best.codes), torch.where(better, q.scales, best.scales), g, numerics
        )
    if best is None:
        raise FormatError(f"the window {window} is empty")
    return best
