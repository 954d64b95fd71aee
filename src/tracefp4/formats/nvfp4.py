"""NVFP4: sixteen E2M1 codes, one E4M3 scale, one FP32 number above them.

A four-bit float spans a factor of twelve from 0.5 to 6. To use it for real data every block of 16 values along the
contraction axis gets a scale ``s`` that brings its largest magnitude to about 6. The scale itself is stored in one
byte, E4M3, which spans ``2^-9`` to 448; to use *that* range well, a global FP32 scale brings the largest block of the
row or tensor to 448. A value is then ``code x s x d``: 4 + 8/16 = 4.5 bits a value.

``code x s`` has at most six significant bits and lies between ``2^-10`` and 2688, so it is exact in bfloat16 and
float16. Only the FP32 number ``d`` would spoil that; it stays outside the operands and multiplies the finished
product.

The presets below are the same format computed by different people. Sources: TransformerEngine
``custom_recipes/reference_nvfp4.py``; ModelOpt 0.47 ``qtensor/nvfp4_tensor.py``; compressed-tensors 0.20.1
``quantization/utils/helpers.py`` and ``lifecycle/forward.py``; FlashInfer 0.7.4 ``quantization_utils.cuh``; SGLang
0.5.23
``kvfp4_tensor.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tracefp4.formats.numerics import Numerics

TE = Numerics(name="nvfp4-te")
"""TransformerEngine, and our default. ``s = E4M3(min(m * (g * (1/6)), 448))``, ``z = x * min(1 / (s * (1/g)),
FLT_MAX)``."""

POW2 = Numerics(name="nvfp4-pow2", scale_rule="divide", quotient="divide", global_rule="pow2", global_form="decode")
"""Ours: the global scale is a power of two, so ``s = E4M3(m / (6 d))`` and ``z = x / (s d)`` are the correctly rounded
quotients of real numbers whatever the order of operations, the epilogue is exact, and a small change of the largest
value rarely changes the global scale."""

MODELOPT = Numerics(
    name="nvfp4-modelopt",
    scale_rule="divide",
    quotient="divide",
    global_form="decode",
    scale_floor=2.0**-9,
    zero_scale=1.0,
)
"""ModelOpt: ``d = a / 2688``, ``s = E4M3(clamp(m / (6 d), 2^-9, 448))``, blocks of zeros get scale 1, true division."""

COMPRESSED_TENSORS = Numerics(
    name="nvfp4-ct",
    negative_zero="strict",
    scale_rule="block-first",
    quotient="divide-ratio",
    global_rule="amax-rcp",
    zero_scale=0.125,
    scope="tensor",
)
"""compressed-tensors on the CPU: ``g = (1/a) * 2688``, ``s = E4M3(g * (m / 6))``, a scale of zero becomes 0.125,
``z = x / (s / g)``. On CUDA its ``m / 6`` is a multiplication by ``1/6``, as eager PyTorch does it."""

FLASHINFER_EXACT = replace(TE, name="nvfp4-flashinfer-exact")
"""FlashInfer and TensorRT-LLM with ``FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1``: TransformerEngine's formula."""

FLASHINFER_FAST = replace(TE, name="nvfp4-flashinfer-fast", scale_rule="block-first-rcp")
"""FlashInfer's default, approximately: ``s = E4M3(g * (m * rcp(6)))``. The kernel's ``rcp.approx.ftz`` is specified
to 1 unit in the last place only; here it is the correctly rounded reciprocal. Scales can differ by one E4M3 step,
rarely."""

SGLANG_KV = replace(TE, name="sglang-kv-nvfp4", scope="constant")
"""SGLang's NVFP4 KV cache: FlashInfer's formula under a constant FP32 scale of the layer, 1.0 unless calibrated."""

PRESETS = {n.name: n for n in (TE, POW2, MODELOPT, COMPRESSED_TENSORS, FLASHINFER_EXACT, FLASHINFER_FAST, SGLANG_KV)}
"""By name, for :func:`tracefp4.formats.numerics.get_numerics`."""
