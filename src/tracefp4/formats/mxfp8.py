"""MXFP8: thirty-two E4M3 elements and one power of two.

The activation format of W4A8 deployments: MXFP4 weights against activations of 8 + 8/32 = 8.25 bits. Elements have
three mantissa bits, so their rounding error is a quarter of FP4's. Bytes are ordered like magnitudes and neighbours
differ in their lowest bit, so guided rounding works as for FP4 (:mod:`tracefp4.quantizers.guided_e4m3`).

The scale is the smallest power of two that does not clip (``2^ceil(log2(m / 448))``), as NVIDIA's MXFP8 kernels choose
it. ``code x scale`` has four significant bits and is exact in bfloat16 wherever it does not overflow or fall below
``2^-133``.
"""

from __future__ import annotations

from tracefp4.formats.numerics import Numerics

MXFP8 = Numerics(
    name="mxfp8",
    element="e4m3",
    block=32,
    scale_format="e8m0",
    scale_rule="ceil",
    quotient="divide",
    scope="none",
    zero_scale=2.0**-127,
)
"""E4M3 elements, E8M0 scales that never clip."""

PRESETS = {MXFP8.name: MXFP8}
"""By name, for :func:`tracefp4.formats.numerics.get_numerics`."""
