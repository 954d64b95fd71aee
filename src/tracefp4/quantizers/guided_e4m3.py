"""Guided rounding of eight-bit elements, by the same parity argument.

The magnitudes of E4M3 are ordered like their bytes, so the bytes of two neighbours differ by one and their lowest bit
tells them apart, as it does for E2M1. An MXFP8 activation of a W4A8 deployment can therefore be guided by one bit a
value as well: ``z`` in units of the rollout's scale, its two neighbours on the E4M3 grid, and the one whose low bits
are the recorded ones.

What differs is what more bits mean. A byte has seven magnitude bits, of which a plan keeps at most four: with ``b``
bits the magnitude is known modulo ``2^b``, for every ``b``, and the sign is always that of ``z``.

``bracket``  the end congruent to the record; if neither is, the end on the side of the nearest congruent magnitude
``nearest``  the congruent magnitude nearest to ``z`` (the smaller of two equally near)
``map``      the congruent magnitude whose rounding cell is nearest
``replay``   as ``nearest``: no plan keeps whole bytes, but with four bits sixteen steps lie between two candidates

Edges are those of :mod:`tracefp4.quantizers.guided`: ``|z| = 448`` has the bracket 416, 448; a grid point below it is
its own bracket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.formats.e4m3 import MAX, value_table
from tracefp4.formats.tables import lookup, on_device

_LAST = 126
"""Byte of 448."""
_SHIFT = 20
"""Mantissa bits of a float32 beyond the three of E4M3."""
_REBIAS = (127 - 7) << 3
"""Difference of the exponent biases, in units of the last kept bit."""


def choose_e4m3(z: Tensor, low: Tensor, bits: int, decoder: str) -> Tensor:
    """The byte that the recorded bits name for each normalised value.

    Args:
        z: float32, any shape, in units of the rollout's scale.
        low: uint8, same shape, values below ``2 ** bits``.
        bits: how many low bits of each byte were kept, 1 to 4.
        decoder: ``bracket``, ``nearest``, ``map`` or ``replay``.

    Returns:
        uint8 bytes, same shape. A NaN counts as 448.
    """
    size = z.abs().nan_to_num(nan=MAX).clamp(max=MAX)
    values = on_device(value_table, z.device, torch.float32)
    lower = _floor(size)
    upper = torch.where(lookup(values, lower) == size, lower, lower + 1)
    step = 1 << bits
    below = lower - (lower - low.to(torch.int32)) % step
    above = below + step
    if decoder == "map":
        far_below, far_above = _cell_distances(size, below, above, values)
    else:
        far_below = size - lookup(values, below.clamp(min=0))
        far_above = lookup(values, above.clamp(max=_LAST)) - size
    take_below = ((far_below <= far_above) | (above > _LAST)) & (below >= 0)
    code = torch.where(take_below, below, above)
    if decoder == "bracket":
        # An end that is congruent wins over a candidate outside of the bracket that happens to be nearer.
        code = torch.where(above == upper, upper, torch.where(below == lower, lower, code))
        code = torch.minimum(torch.maximum(code, lower), upper)
    return (code + 128 * (torch.signbit(z) & ~z.isnan())).to(torch.uint8)


def _floor(size: Tensor) -> Tensor:
    """Byte of the largest magnitude not above ``size``, at most 125; int32."""
    normal = size.contiguous().view(torch.int32).bitwise_right_shift(_SHIFT) - _REBIAS
    subnormal = (size * 512).to(torch.int32)
    return torch.where(size < 2.0**-6, subnormal, normal).clamp(max=_LAST - 1)


def _cell_distances(size: Tensor, below: Tensor, above: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Distances from ``size`` to the rounding cells of two candidates, 0 inside of them."""

    def middle(index: Tensor) -> Tensor:
        index = index.clamp(0, _LAST - 1)
        return (lookup(values, index) + lookup(values, index + 1)) / 2

    return (size - middle(below)).clamp(min=0), (middle(above - 1) - size).clamp(min=0)
