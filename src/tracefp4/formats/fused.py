"""Numerics as kernels take them, and when a kernel stands in for :mod:`tracefp4.formats.blocks`.

The kernels below this package know no :class:`Numerics`; this file spells one out for them. They compute E2M1 elements
only: MXFP8 keeps the plain code, which is also the reference that every kernel equals bit for bit.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from tracefp4.formats import e4m3, e8m0
from tracefp4.formats.numerics import Numerics
from tracefp4.kernels.rules import Rules
from tracefp4.kernels.runtime import usable


@lru_cache(maxsize=64)
def rules(numerics: Numerics) -> Rules:
    """The choices of ``numerics`` as compile-time constants."""
    byte = e4m3.byte if numerics.scale_format == "e4m3" else e8m0.byte
    return Rules(
        block=numerics.block,
        e8m0=numerics.scale_format == "e8m0",
        ties=numerics.ties,
        negative_zero=numerics.negative_zero,
        scale_rule=numerics.scale_rule,
        scale_floor=numerics.scale_floor,
        floor_byte=byte(numerics.scale_floor) if numerics.scale_floor else 0,
        zero_byte=byte(numerics.zero_scale),
        quotient=numerics.quotient,
        scope=numerics.scope,
        global_rule=numerics.global_rule,
        global_form=numerics.global_form,
        constant=numerics.constant,
    )


def has_kernel(x: Tensor, numerics: Numerics, gated: bool = False) -> bool:
    """Whether a kernel quantizes ``x (..., D)``; a tensor that the plain code would refuse is left to it.

    ``gated``: ``x (..., 2 D)`` holds gate and up, and what is quantized is ``silu(gate) * up``.
    """
    if numerics.element != "e2m1" or not usable(x):
        return False
    multiple = numerics.block * (2 if gated else 1)
    if not x.dtype.is_floating_point or x.element_size() > 4 or x.ndim == 0 or x.shape[-1] % multiple:
        return False
    from tracefp4.kernels.quantize import fits

    return fits(x, rules(numerics), gated)
