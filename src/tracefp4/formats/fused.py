"""Numerics as kernels take them, and when a kernel stands in for :mod:`tracefp4.formats.blocks`.

The kernels below this package know no :class:`Numerics`; this file spells one out for them. They compute E2M1 elements,
and E4M3 elements under E8M0 scales (MXFP8). Anything else keeps the plain code, which is also the reference that every
kernel equals bit for bit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats import e4m3, e8m0
from tracefp4.formats.numerics import Numerics
from tracefp4.kernels.rules import Rules
from tracefp4.kernels.runtime import usable

if TYPE_CHECKING:
    from tracefp4.kernels.outputs import Fused


@lru_cache(maxsize=64)
def rules(numerics: Numerics) -> Rules:
    """The choices of ``numerics`` as compile-time constants."""
    byte = e4m3.byte if numerics.scale_format == "e4m3" else e8m0.byte
    eight = numerics.element == "e4m3"
    return Rules(
        block=numerics.block,
        eight=eight,
        e8m0=numerics.scale_format == "e8m0",
        ties="even" if eight else numerics.ties,
        negative_zero="keep" if eight else numerics.negative_zero,
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
    if (numerics.element == "e4m3" and numerics.scale_format != "e8m0") or not usable(x):
        return False
    multiple = numerics.block * (2 if gated else 1)
    if not x.dtype.is_floating_point or x.element_size() > 4 or x.ndim == 0 or x.shape[-1] % multiple:
        return False
    from tracefp4.kernels.quantize import fits

    return fits(x, rules(numerics), gated)


def quantize_by_kernel(
    x: Tensor, numerics: Numerics, global_scale: Tensor | None = None, per: int = 0, *, packed: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What :func:`tracefp4.formats.blocks.quantize` computes, in one pass, or two where many rows share a global scale.

    Args:
        x: a tensor that :func:`has_kernel` admits, with values.
        numerics: every arithmetic choice.
        global_scale: use this one (primary form).
        per: for scope ``tensor``, how many leading axes have a global scale each.
        packed: return codes two a byte.

    Returns:
        ``(codes, scales, global scale)``: uint8 ``(..., D)``, or ``(..., D / 2)`` if packed; uint8 ``(..., D / B)``; as
        in :class:`tracefp4.formats.blocks.Quantized`.

    Raises:
        FormatError: ``packed``, and elements of more than four bits; or the kernel wrote no codes.
    """
    out, global_scale = _by_kernel(x, numerics, global_scale, per, codes=not packed, packed=packed)
    codes = out.packed if packed else out.codes
    if codes is None:
        raise FormatError(f"The kernel of {numerics.name!r} wrote no codes.")
    return codes, out.scales, global_scale


def operand_by_kernel(
    x: Tensor, numerics: Numerics, per: int = 0, into: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The exact operand of ``x`` alone, where nobody wants its codes.

    Args:
        x: see :func:`quantize_by_kernel`.
        numerics: see there.
        per: see there.
        into: contiguous bfloat16 ``(..., D)`` that is written and returned, or ``None``.

    Returns:
        ``code x block scale``, bfloat16 ``(..., D)``, and the global scale.

    Raises:
        FormatError: the kernel wrote no operand.
    """
    out, global_scale = _by_kernel(x, numerics, None, per, operand=True if into is None else into)
    if out.operand is None:
        raise FormatError(f"The kernel of {numerics.name!r} wrote no operand.")
    return out.operand, global_scale


def _by_kernel(
    x: Tensor, numerics: Numerics, global_scale: Tensor | None, per: int, **wanted: bool | Tensor
) -> tuple[Fused, Tensor | None]:
    """What the kernel wrote, and the global scale in the shape of :class:`tracefp4.formats.blocks.Quantized`."""
    from tracefp4.kernels.quantize import global_scales, quantize

    made = rules(numerics)
    if global_scale is None and numerics.scope == "tensor":
        shape = (*x.shape[:per], *(1 for _ in x.shape[per:])) if per else ()
        global_scale = global_scales(x, made, math.prod(x.shape[:per])).view(shape)
    given = None if global_scale is None else global_scale.contiguous()
    out = quantize(x, made, given, **wanted)  # type: ignore[arg-type]
    return out, out.global_scale if global_scale is None else global_scale
