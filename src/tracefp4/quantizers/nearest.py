"""Round to nearest: what the rollout does everywhere, and the trainer where it has no guidance."""

from __future__ import annotations

from torch import Tensor

from tracefp4.formats.blocks import Quantized, quantize
from tracefp4.formats.numerics import Numerics


def quantize_nearest(x: Tensor, numerics: Numerics, global_scale: Tensor | None = None) -> Quantized:
    """Quantize ``x (..., D)`` with scales of its own.

    Args:
        x: bfloat16, float16 or float32; the last axis is a multiple of the block size.
        numerics: every arithmetic choice.
        global_scale: float32 in primary form, instead of one made from ``x``.

    Raises:
        FormatError: wrong dtype or size.
    """
    return quantize(x, numerics, global_scale)
