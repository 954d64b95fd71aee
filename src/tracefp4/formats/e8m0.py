"""E8M0: the block scale of the OCP MX formats, a bare exponent.

Byte ``b`` is ``2^(b - 127)``, from ``2^-127`` (byte 0; there is no zero) to ``2^127`` (byte 254). Byte 255 is NaN. In
float32 terms it is the exponent field alone, except that ``2^-127`` is a subnormal.

Three rules choose the exponent for a block with largest magnitude ``m`` and elements up to ``e = (1 + f) 2^p`` (6 is
``1.5 x 2^2``, 448 is ``1.75 x 2^8``):

``floor``   ``2^(floor(log2 m) - p)``, the rule of OCP MX v1.0. Clips up to ``m / scale = 2^(p+1)``: 8 becomes 6.
``ceil``    ``2^ceil(log2(m / e))``, the smallest scale that never clips (FlashInfer, ModelOpt, torchao's RCEIL).
``half``    floor after adding half a unit of the element's last place: from ``1.75 x 2^k`` up the next power of two
            (compressed-tensors). Clips up to 7.

All three read the exponent and the mantissa of ``m`` as integers, so none depends on the accuracy of a logarithm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NAN = 255
"""The NaN byte."""

RULES = ("floor", "ceil", "half")
"""Rules of :func:`from_amax`."""


def decode(data: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of bytes, exact in float32 and bfloat16.

    Args:
        data: uint8, any shape.
        dtype: result type.
    """
    bits = data.to(torch.int32)
    # Byte 0 is the subnormal 2^-127 and byte 255 a NaN; both are the plain exponent field plus the top mantissa bit.
    odd = ((bits == 0) | (bits == NAN)).to(torch.int32)
    return bits.bitwise_left_shift(23).bitwise_or_(odd << 22).view(torch.float32).to(dtype)


def from_amax(amax: Tensor, rule: str, power: int, mantissa: int) -> Tensor:
    """Scale bytes for blocks with the given largest magnitudes.

    Args:
        amax: float32, non-negative; infinity counts as the largest finite float, NaN gives byte 255.
        rule: ``"floor"``, ``"ceil"`` or ``"half"``.
        power: ``p``, the exponent of the largest element.
        mantissa: for ``ceil`` the float32 mantissa field of the largest element, above which the exponent goes up; for
            ``half`` the field from which it goes up.

    Returns:
        uint8, same shape. Zero gives byte 0.
    """
    bits = amax.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max).view(torch.int32)
    exponent, field = bits >> 23, bits & 0x7FFFFF
    if rule == "ceil":
        exponent = exponent + (field > mantissa)
    elif rule == "half":
        exponent = exponent + (field >= mantissa)
    data = (exponent - power).clamp(0, 254)
    return torch.where(amax.isnan(), NAN, data).to(torch.uint8)


def byte(value: float) -> int:
    """Byte of a power of two from ``2^-127`` to ``2^127``."""
    return math.frexp(value)[1] + 126
