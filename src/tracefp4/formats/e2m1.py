"""E2M1: the four-bit float of NVFP4 and MXFP4.

A code is four bits ``s ee m``: bit 3 the sign, bits 2-1 the exponent, bit 0 the mantissa. With exponent ``e > 0`` the
magnitude is ``(1 + m/2) 2^(e-1)``, with ``e = 0`` it is ``m/2``. The eight magnitudes in the order of their codes::

    code        0    1    2    3    4    5    6    7
    magnitude   0    .5   1    1.5  2    3    4    6

Two facts carry this package. The order of codes is the order of magnitudes, so code ``k + 1`` is the upper neighbour of
code ``k``. And bit 0 alternates along that order, so of two neighbours it names exactly one.

Rounding is to the nearest magnitude; three tie rules are in use on the midpoints (NVIDIA hardware, one MXFP4 checkpoint
tool, one KV-cache quantizer)::

    midpoint    .25  .75  1.25 1.75 2.5  3.5  5
    even        0    1    1    2    2    4    4     ties to the code with an even last bit, as IEEE rounding does
    up          .5   1    1.5  2    3    4    6     away from zero
    down        0    .5   1    1.5  2    3    4     towards zero

Beyond 6 the code saturates. NaN becomes +6, as the PTX instruction ``cvt.rn.satfinite.e2m1x2.f32`` does; block formats
never rely on that (see :mod:`tracefp4.formats.blocks`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tracefp4.errors import FormatError, suggest
from tracefp4.formats.tables import build, classify, lookup, on_device

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by code 0..7. Codes 8..15 are their negatives."""

MAX = 6.0
"""Largest magnitude."""

TIES = ("even", "up", "down")
"""Tie rules of :func:`encode`."""

NEGATIVE_ZERO = ("keep", "strict", "positive")
"""Sign of a zero result: the sign of z; negative only if z < 0 (so -0.0 gives code 0); never negative."""


def encode(z: Tensor, ties: str = "even", negative_zero: str = "keep") -> Tensor:
    """Round to the nearest E2M1 value.

    Args:
        z: float32, any shape; values beyond 6 saturate.
        ties: ``"even"``, ``"up"`` or ``"down"``.
        negative_zero: ``"keep"``, ``"strict"`` or ``"positive"``.

    Returns:
        uint8 codes ``0..15``, same shape.

    Raises:
        FormatError: ``z`` is not float32, or a rule is unknown.
    """
    if z.dtype != torch.float32:
        raise FormatError(f"e2m1.encode takes float32, got {z.dtype}; convert with .float() first.")
    if ties not in TIES:
        raise FormatError(f"Unknown tie rule {ties!r}{suggest(ties, TIES)}.")
    if negative_zero not in NEGATIVE_ZERO:
        raise FormatError(
            f"Unknown rule for the sign of zero {negative_zero!r}{suggest(negative_zero, NEGATIVE_ZERO)}."
        )
    return lookup(on_device(encode_table, z.device, ties, negative_zero), classify(z))


def encode_table(ties: str, negative_zero: str) -> Tensor:
    """Code of every class of floats (:mod:`tracefp4.formats.tables`), uint8 ``(16384,)``."""

    def decide(value: np.ndarray) -> np.ndarray:
        """The code of each value."""
        grid = np.array(MAGNITUDES)
        middles = (grid[1:] + grid[:-1]) / 2
        size = np.abs(value)
        below = np.searchsorted(middles, size, side="left")  # a tie stays below
        above = np.searchsorted(middles, size, side="right")  # a tie goes up
        code = {"down": below, "up": above, "even": np.where(below % 2 == 0, below, above)}[ties]
        negative = np.signbit(value)
        if negative_zero == "strict":
            negative &= value < 0
        elif negative_zero == "positive":
            negative &= code > 0
        return np.where(np.isnan(value), 7, code + 8 * negative)

    return build(decide)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of codes, exact in every float type of 16 bits or more.

    Args:
        codes: uint8 ``0..15``, any shape.
        dtype: float32, bfloat16, float16 or float64.
    """
    return lookup(on_device(decode_table, codes.device, dtype), codes.to(torch.int32))


def decode_table(dtype: torch.dtype) -> Tensor:
    """Values of the sixteen codes, ``(16,)``."""
    return torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=dtype)


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, the even index in the low nibble (the layout of every checkpoint format).

    Args:
        codes: uint8 ``(..., D)`` with values ``0..15``.

    Returns:
        uint8 ``(..., D / 2)``.

    Raises:
        FormatError: ``D`` is odd or the dtype is not uint8.
    """
    if codes.dtype != torch.uint8 or codes.ndim == 0 or codes.shape[-1] % 2:
        raise FormatError(
            f"e2m1.pack takes uint8 codes with an even last axis, got {codes.dtype} {tuple(codes.shape)}."
        )
    return codes[..., 1::2].bitwise_left_shift(4).bitwise_or_(codes[..., 0::2])


def unpack(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack`: uint8 ``(..., D / 2)`` to codes ``(..., D)``."""
    if packed.dtype != torch.uint8 or packed.ndim == 0:
        raise FormatError(f"e2m1.unpack takes packed uint8 bytes, got {packed.dtype} {tuple(packed.shape)}.")
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def bracket(z: Tensor) -> tuple[Tensor, Tensor]:
    """The two neighbours of ``z``: the largest magnitude not above ``|z|`` and the smallest not below it.

    Both carry the sign of ``z``. On a grid point below 6 the two are that point; ``|z| >= 6`` has the bracket 4, 6.

    Args:
        z: float32, any shape.

    Returns:
        ``(lower, upper)`` uint8 codes, lower and upper by magnitude.
    """
    cell = classify(z)
    lower = lookup(on_device(bracket_table, z.device, "lower"), cell)
    return lower, lookup(on_device(bracket_table, z.device, "upper"), cell)


def bracket_table(end: str) -> Tensor:
    """Code of one end of the bracket of every class of floats, uint8 ``(16384,)``."""

    def decide(value: np.ndarray) -> np.ndarray:
        """The code of each value."""
        inner = np.array(MAGNITUDES[:-1])
        lower = np.searchsorted(inner, np.abs(value), side="right") - 1
        stays = inner[lower] == np.abs(value)
        code = lower if end == "lower" else lower + ~stays
        return np.where(np.isnan(value), 7, code + 8 * np.signbit(value))

    return build(decide)
