"""MXFP4: thirty-two E2M1 codes and one power of two.

The OCP microscaling formats use a bare exponent as block scale (E8M0) and nothing above it: 4 + 8/32 = 4.25 bits a
value. The range of the scale is that of float32, so no global scale is needed; its resolution is a factor of two, so
the largest value of a block lands anywhere in a factor of two below the end of the grid, or is clipped.

bfloat16 values divided by powers of two hit the midpoints of the grid often, so the tie rule matters more than in
NVFP4.
``code x scale`` is exact in bfloat16 except where it overflows (scales ``2^126`` and ``2^127``).

Sources: OCP Microscaling Formats (MX) v1.0, section 6.3; FlashInfer 0.7.4; compressed-tensors 0.20.1
``quantization/utils/mxfp_utils.py``; SGLang 0.5.23 ``kvfp4_tensor.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tracefp4.formats.numerics import Numerics

OCP = Numerics(
    name="mxfp4-ocp",
    block=32,
    scale_format="e8m0",
    scale_rule="floor",
    quotient="divide",
    scope="none",
    zero_scale=2.0**-127,
)
"""OCP MX v1.0: ``2^(floor(log2 m) - 2)``; values between 6 and 8 scale units saturate."""

CEIL = replace(OCP, name="mxfp4-ceil", scale_rule="ceil")
"""``2^ceil(log2(m / 6))``: never clips. FlashInfer, ModelOpt, fouroversix; torchao's RCEIL."""

COMPRESSED_TENSORS = replace(OCP, name="mxfp4-ct", negative_zero="strict", scale_rule="half")
"""compressed-tensors: ``m >= 1.75 x 2^k`` takes the next power of two; values between 6 and 7 scale units saturate."""

SGLANG_KV = replace(
    CEIL,
    name="sglang-kv-mx",
    block=16,
    ties="up",
    negative_zero="strict",
    scale_floor=2.0**-33,
    zero_scale=2.0**-33,
)
"""SGLang's "MX" KV cache: block 16, ``2^ceil(log2(max(m / 6, 1e-10)))``, ties away from zero."""

PRESETS = {n.name: n for n in (OCP, CEIL, COMPRESSED_TENSORS, SGLANG_KV)}
"""By name, for :func:`tracefp4.formats.numerics.get_numerics`."""
