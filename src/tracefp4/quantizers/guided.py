"""Guided rounding: the trainer rounds as the rollout did.

At a site the rollout used scale ``s`` and codes ``q_roll``. The trainer computed its own value ``x`` for the same
token, nearly equal. Rounded to nearest, two nearly equal values can still end one grid step apart, and a step is a
third to a half of the value. Guidance removes that::

    z = clip(x / s, -6, 6)       in units of the rollout's scale
    q-, q+                       the two FP4 neighbours of z
    q*                           the one of them that the recorded bits name
    forward q* s, backward identity

What names a neighbour. Codes ``k`` and ``k + 1`` are adjacent magnitudes:

``bits=4``  the whole code: the end nearer to ``q_roll``. Only here ``|q* - q_roll| <= |round(z) - q_roll|`` is sure.
``bits=3``  the magnitude, taken with the sign of ``z``: the end nearer to it.
``bits=2``  ``k mod 4``: the end congruent to it; if neither is, the nearest congruent magnitude to ``z`` (of two
            equally near, the smaller), projected onto the bracket.
``bits=1``  ``k mod 2``, the mantissa bit: adjacent magnitudes alternate, so it names exactly one end.

Edges. ``|z| = 6``, also after the clip, has the bracket 4, 6. A ``z`` exactly on a grid point below 6 is its own
bracket and stays, whatever was recorded. Where the rollout's block scale is 0, the code is 0. A NaN of the trainer's
marks its block (scale byte NaN) instead of being rounded to something finite.

Other decoders. ``nearest``: the congruent magnitude nearest to ``z`` in the whole codebook. ``map``: the one whose
rounding cell is nearest, which is the most probable code under a small symmetric error. ``replay``: the recorded code,
whatever ``z`` is (4 bits). The first two keep the sign of ``z``, and with 4 bits they are ``replay``.

A decision depends on ``z`` only through comparisons with a few dyadic thresholds, so it is tabulated from the
definition: class of ``z`` to cell, then (cell, recorded bits) to code (:mod:`tracefp4.formats.tables`). Elements of
eight bits have a file of their own (:mod:`tracefp4.quantizers.guided_e4m3`). Distances
matter inside a bracket too: under ``bits=2`` the nearest congruent magnitude changes at 3.75, inside [3, 4].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tracefp4.errors import FormatError, suggest
from tracefp4.formats import e4m3, e8m0
from tracefp4.formats.blocks import Quantized, block_scales, clear_zero_blocks, encode, normalize
from tracefp4.formats.e2m1 import MAGNITUDES
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.tables import classify, lookup, on_device, representatives
from tracefp4.quantizers.congruent import LARGEST_E4M3, LARGEST_E8M0, restore_scales
from tracefp4.quantizers.guided_e4m3 import choose_e4m3

DECODERS = ("bracket", "nearest", "map", "replay")
"""How recorded bits are read."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was kept of the rollout's quantization of one tensor.

    ``low`` uint8 ``(..., D)``: the low ``bits`` (1 to 4) bits of each code, which has eight for E4M3 elements.
    ``scales`` uint8 ``(..., D / B)``: whole bytes when ``scale_bits`` is 8, else their low 2 or 3 bits.
    ``global_scale`` float32 ``(..., 1)`` in primary form, ``None`` where the numerics has a constant or none.
    """

    low: Tensor
    scales: Tensor
    global_scale: Tensor | None
    bits: int
    scale_bits: int = 8


def choose(z: Tensor, low: Tensor, bits: int, decoder: str = "bracket") -> Tensor:
    """The code that the recorded bits name for each normalised value.

    Args:
        z: float32, any shape, in units of the rollout's scale.
        low: uint8, same shape, values below ``2 ** bits``.
        bits: how many bits of each code were kept, 1 to 4.
        decoder: one of :data:`DECODERS`.

    Returns:
        uint8 codes ``0..15``, same shape.

    Raises:
        FormatError: unknown decoder or bits, ``replay`` with fewer than 4 bits, wrong dtype or shape.
    """
    _check_choice(z, low, bits, decoder)
    cells = lookup(on_device(cell_table, z.device, bits, decoder), classify(z))
    index = cells.to(torch.int32).bitwise_left_shift_(bits).bitwise_or_(low)
    return lookup(on_device(code_table, z.device, bits, decoder), index)


def choose_eight(z: Tensor, low: Tensor, bits: int, decoder: str = "bracket") -> Tensor:
    """As :func:`choose` for E4M3 elements: bytes on that grid (:mod:`tracefp4.quantizers.guided_e4m3`)."""
    _check_choice(z, low, bits, decoder)
    return choose_e4m3(z, low, bits, decoder)


def quantize_guided(x: Tensor, outcome: Outcome, numerics: Numerics, decoder: str = "bracket") -> Quantized:
    """Quantize ``x (..., D)`` with the rollout's scales, each value to the neighbour that the rollout's outcome names.

    Args:
        x: the trainer's values, bfloat16, float16 or float32.
        outcome: what the rollout recorded for the same values.
        numerics: the site's numerics, equal on both sides.
        decoder: one of :data:`DECODERS`.

    Raises:
        FormatError: shapes, dtypes or bits do not fit.
    """
    _check_shapes(x, outcome, numerics)
    scales = rollout_scales(x, outcome, numerics)
    z = normalize(x, scales, outcome.global_scale, numerics)
    pick = choose if numerics.element == "e2m1" else choose_eight
    codes = clear_zero_blocks(pick(z, outcome.low, outcome.bits, decoder), scales, numerics)
    # After the clip a sum is NaN only if a value is; then the block decodes to NaN instead of to a finite guess.
    broken = z.unflatten(-1, (-1, numerics.block)).sum(-1).isnan()
    nan = e4m3.NAN if numerics.scale_format == "e4m3" else e8m0.NAN
    return Quantized(codes, scales.masked_fill(broken, nan), outcome.global_scale, numerics)


def nearest_codes(x: Tensor, outcome: Outcome, numerics: Numerics) -> Tensor:
    """Codes uint8 ``(..., D)`` of ``x (..., D)`` rounded to nearest at the rollout's scales; no recorded bit counts."""
    scales = rollout_scales(x, outcome, numerics)
    codes = encode(normalize(x, scales, outcome.global_scale, numerics), numerics)
    return clear_zero_blocks(codes, scales, numerics)


def rollout_scales(x: Tensor, outcome: Outcome, numerics: Numerics) -> Tensor:
    """The rollout's scale bytes: as recorded, or restored from their low bits with the help of the trainer's ``x``."""
    if outcome.scale_bits == 8:
        return outcome.scales
    own = block_scales(x, outcome.global_scale, numerics)
    largest = LARGEST_E4M3 if numerics.scale_format == "e4m3" else LARGEST_E8M0
    return restore_scales(own, outcome.scales, outcome.scale_bits, largest)


def cell_table(bits: int, decoder: str) -> Tensor:
    """Cell of every class of floats: classes in one cell decide alike. uint8 ``(16384,)``."""
    return torch.from_numpy(_decisions(bits, decoder)[1].astype(np.uint8))


def code_table(bits: int, decoder: str) -> Tensor:
    """Code for each ``(cell, recorded bits)``, flat, uint8."""
    return torch.from_numpy(_decisions(bits, decoder)[0].reshape(-1))


def _decisions(bits: int, decoder: str) -> tuple[np.ndarray, np.ndarray]:
    """``(rows, cell)``: the distinct decisions ``(cells, 2 ** bits)`` and the row of each class."""
    value = np.clip(np.nan_to_num(representatives(), nan=6.0), -6.0, 6.0)
    sign = 8 * np.signbit(value)
    table = np.stack([_decide(np.abs(value), sign, low, bits, decoder) for low in range(1 << bits)], axis=1)
    rows, cell = np.unique(table.astype(np.uint8), axis=0, return_inverse=True)
    return rows, cell.reshape(-1)


def _decide(size: np.ndarray, sign: np.ndarray, low: int, bits: int, decoder: str) -> np.ndarray:
    """Codes for magnitudes ``size`` with sign bits ``sign`` (0 or 8) under the recorded bits ``low``."""
    if decoder == "replay" or (bits == 4 and decoder != "bracket"):
        return np.full(size.shape, low)
    if decoder == "nearest":
        return sign + _nearest_congruent(size, low, bits)
    if decoder == "map":
        return sign + _nearest_cell(size, low, bits)
    grid = np.array(MAGNITUDES)
    lower = np.searchsorted(grid[:-1], size, side="right") - 1
    upper = np.where(grid[lower] == size, lower, lower + 1)
    if bits == 4:
        # Seen from z's side of zero, a code of the other sign lies below every magnitude: the lower end is nearer.
        wanted = np.where((low & 8) == sign, low & 7, -1)
    elif bits == 3:
        wanted = np.full(size.shape, low)
    else:
        congruent = _nearest_congruent(size, low, bits)
        step = 1 << bits
        wanted = np.where(upper % step == low, upper, np.where(lower % step == low, lower, congruent))
    return sign + np.clip(wanted, lower, upper)


def _congruent(low: int, bits: int) -> np.ndarray:
    return np.arange(low, 8, 1 << bits)


def _nearest_congruent(size: np.ndarray, low: int, bits: int) -> np.ndarray:
    """Index of the magnitude nearest to ``size`` among those congruent to ``low``; the smaller of two equally near."""
    candidates = _congruent(low, bits)
    distance = np.abs(np.array(MAGNITUDES)[candidates] - size[:, None])
    return candidates[distance.argmin(axis=1)]


def _nearest_cell(size: np.ndarray, low: int, bits: int) -> np.ndarray:
    """As :func:`_nearest_congruent`, by the distance from ``size`` to a magnitude's rounding cell."""
    candidates = _congruent(low, bits)
    grid = np.array(MAGNITUDES)
    middles = (grid[1:] + grid[:-1]) / 2
    start = np.concatenate([[-np.inf], middles])[candidates]
    stop = np.concatenate([middles, [np.inf]])[candidates]
    distance = np.maximum(np.maximum(start - size[:, None], size[:, None] - stop), 0.0)
    return candidates[distance.argmin(axis=1)]


def _check_choice(z: Tensor, low: Tensor, bits: int, decoder: str) -> None:
    if decoder not in DECODERS:
        raise FormatError(f"Unknown decoder {decoder!r}{suggest(decoder, DECODERS)}.")
    if bits not in (1, 2, 3, 4):
        raise FormatError(f"Guidance keeps 1 to 4 bits of each code, got {bits}.")
    if decoder == "replay" and bits != 4:
        raise FormatError(f"Decoder 'replay' needs whole codes (4 bits), the guidance has {bits}; use 'bracket'.")
    if z.dtype != torch.float32 or low.dtype != torch.uint8 or z.shape != low.shape:
        raise FormatError(
            f"choose takes float32 z and uint8 low bits of one shape, got {z.dtype} {tuple(z.shape)} and "
            f"{low.dtype} {tuple(low.shape)}."
        )


def _check_shapes(x: Tensor, outcome: Outcome, numerics: Numerics) -> None:
    blocks = (*x.shape[:-1], x.shape[-1] // numerics.block) if x.ndim else ()
    if outcome.low.shape != x.shape or tuple(outcome.scales.shape) != blocks:
        raise FormatError(
            f"Guidance of shape {tuple(outcome.low.shape)} with scales {tuple(outcome.scales.shape)} does not fit "
            f"values {tuple(x.shape)} in blocks of {numerics.block}."
        )
    if outcome.scale_bits not in (2, 3, 8):
        raise FormatError(f"Scales travel in 2, 3 or 8 bits, got {outcome.scale_bits}.")
    if (outcome.global_scale is None) != (numerics.scope in ("constant", "none")):
        raise FormatError(
            f"Numerics {numerics.name!r} (global scale: {numerics.scope}) does not fit guidance "
            f"{'without' if outcome.global_scale is None else 'with'} global scales."
        )
