"""Four over six: each block may put its largest value at 4 instead of 6.

E2M1 has nothing between 4 and 6, so a block whose second largest values lie at five sixths of the largest loses them.
Scaled so that the largest value becomes 4, the same block uses a finer part of the grid. Four over six (Cook et al.,
arXiv 2512.02010) quantizes each block both ways and keeps the better one. The scale of the second way is half as large
again, so the global scale leaves room for it: blocks of the largest values get scale 256 instead of 448, and 1.5 x 256
= 384 is an E4M3 number.

Which is better is a matter of the error inside the block, in the original domain: ``mse`` (sum of squares, the default
of the authors' library), ``mae`` (sum of magnitudes, TransformerEngine's default) or ``absmax`` (the largest). A tie
keeps 6. The result is an ordinary NVFP4 tensor: whoever reads it need not know how it was chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.errors import FormatError, suggest
from tracefp4.formats.blocks import Quantized, block_scales, clear_zero_blocks, encode, global_scale, normalize
from tracefp4.formats.numerics import Numerics

LARGEST_SCALE = 256.0
"""Block scale of the largest value, when it is put at 6."""
EXPANSION = 1.5
"""Ratio of the two block scales, 6 / 4."""
SELECTIONS = ("mse", "mae", "absmax")
"""Errors by which a block chooses."""


def quantize_four_over_six(w: Tensor, numerics: Numerics, select: str = "mse") -> Quantized:
    """Quantize stacked weights, one global scale a leading index.

    Args:
        w: ``(E, N, K)`` bfloat16 or float32.
        numerics: NVFP4 weight numerics (scope ``tensor``).
        select: one of :data:`SELECTIONS`.

    Raises:
        FormatError: other numerics, an unknown selection, or a width that is no multiple of the block.
    """
    if select not in SELECTIONS:
        raise FormatError(f"unknown selection {select!r}{suggest(select, SELECTIONS)}")
    check_weight(w, numerics)
    parts = [_quantize(part, numerics, select) for part in w.split(1)]
    return join(parts, numerics)


def check_weight(w: Tensor, numerics: Numerics) -> None:
    """Raise :class:`FormatError` unless ``w`` is a stack of matrices and ``numerics`` NVFP4 with tensor scope."""
    if numerics.element != "e2m1" or numerics.scale_format != "e4m3" or numerics.scope != "tensor":
        raise FormatError(
            f"block scales are chosen for NVFP4 weights with one global scale a tensor, not for {numerics.name!r}"
        )
    if w.ndim != 3:
        raise FormatError(f"expected stacked weights (experts, out, in), got shape {tuple(w.shape)}")


def join(parts: list[Quantized], numerics: Numerics) -> Quantized:
    """Stack what was quantized expert by expert, which bounds the memory."""
    scales = [q.global_scale for q in parts if q.global_scale is not None]
    return Quantized(
        torch.cat([q.codes for q in parts]),
        torch.cat([q.scales for q in parts]),
        torch.cat(scales) if scales else None,
        numerics,
    )


def _quantize(w: Tensor, numerics: Numerics, select: str) -> Quantized:
    g = global_scale(w, numerics, per=1, largest=LARGEST_SCALE)
    six = _with_scales(w, block_scales(w, g, numerics), g, numerics)
    four = _with_scales(w, block_scales(w, g, numerics, expand=EXPANSION), g, numerics)
    better = _error(w, four, select) < _error(w, six, select)
    wide = better.repeat_interleave(numerics.block, dim=-1)
    scales = torch.where(better, four.scales, six.scales)
    return Quantized(torch.where(wide, four.codes, six.codes), scales, g, numerics)


def _with_scales(w: Tensor, scales: Tensor, g: Tensor | None, numerics: Numerics) -> Quantized:
    codes = encode(normalize(w, scales, g, numerics), numerics)
    return Quantized(clear_zero_blocks(codes, scales, numerics), scales, g, numerics)


def _error(w: Tensor, q: Quantized, select: str) -> Tensor:
    """Error of each block ``(E, N, K / B)``; sums in float64, so that no order of summation decides."""
    difference = (q.dequantize() - w.float()).abs().unflatten(-1, (-1, q.numerics.block))
    if select == "absmax":
        return difference.amax(-1)
    return (difference.square() if select == "mse" else difference).sum(-1, dtype=torch.float64)
