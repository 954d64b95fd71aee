"""One pass from packed codes and scale bytes back to values.

The reverse of :mod:`tracefp4.kernels.quantize`, for tensors that are kept as codes and multiplied as bfloat16: weights
between the micro-batches of a training step, activations between a forward pass and its backward pass. A block is a
row of a tile; where the tensor's rows begin matters only for their global scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import magnitude, narrow
from tracefp4.kernels.rules import Rules
from tracefp4.kernels.scales import scale_value

_VALUES = 2048
"""Values of a program."""


@triton.jit
def _dequantize(
    packed_ptr, scales_ptr, factor_ptr, out_ptr, total, per,
    TILE: tl.constexpr, BLOCK: tl.constexpr, E8M0: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < total
    half: tl.constexpr = BLOCK // 2
    at = block[:, None] * half + tl.arange(0, half)[None, :]
    byte = tl.load(packed_ptr + at, mask=tl.broadcast_to(inside[:, None], (TILE, half)), other=0).to(tl.int32)
    code = tl.reshape(tl.join(byte & 15, byte >> 4), (TILE, BLOCK))
    scale = scale_value(tl.load(scales_ptr + block, mask=inside, other=0).to(tl.int32), E8M0)
    value = magnitude(code, False) * scale[:, None]
    if FACTOR:
        value = value * tl.load(factor_ptr + block // per, mask=inside, other=0.0)[:, None]
    to = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = tl.broadcast_to(inside[:, None], (TILE, BLOCK))
    tl.store(out_ptr + to, narrow(value, out_ptr.dtype.element_ty), mask=mask)


def dequantize(
    packed: Tensor, scales: Tensor, rules: Rules, dtype: torch.dtype, factor: Tensor | None = None
) -> Tensor:
    """Values of packed codes.

    Args:
        packed: uint8 ``(..., D / 2)``, low nibble first, contiguous.
        scales: uint8 ``(..., D / B)``, contiguous.
        rules: block size and scale format.
        dtype: of the result, rounded once.
        factor: float32, multiplies the values: one number, or one for each of equally many consecutive blocks;
            contiguous.

    Returns:
        ``(..., D)``: ``code x block scale``, times ``factor`` if given.
    """
    out = torch.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype, device=packed.device)
    total, tile = scales.numel(), _VALUES // rules.block
    if total:
        _dequantize[(triton.cdiv(total, tile),)](
            packed, scales, scales if factor is None else factor, out, total,
            1 if factor is None else total // factor.numel(),
            TILE=tile, BLOCK=rules.block, E8M0=rules.e8m0, FACTOR=factor is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
