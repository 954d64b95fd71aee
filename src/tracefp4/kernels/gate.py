"""The gate of an expert, ``silu(gate) * up``, with the roundings of the eager code.

Transformers computes it in two steps, and each rounds to the model's dtype. A kernel that does both in registers has to
round in the same two places, or codes of the next product would differ. Where the next product takes codes, the gate is
part of :func:`tracefp4.kernels.quantize.quantize`; here is the kernel for products that do not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import exponential, narrow, widen
from tracefp4.kernels.sizes import cdiv


@triton.jit
def silu(x):
    """SiLU in float32, rounded to the dtype of ``x``."""
    g = widen(x)
    return narrow(tl.div_rn(g, 1.0 + exponential(-g)), x.dtype)


@triton.jit
def silu_product(gate, up):
    """``silu(gate) * up`` in their dtype: SiLU in float32, rounded; the product in float32, rounded."""
    return narrow(widen(silu(gate)) * widen(up), gate.dtype)


@triton.jit
def _gate(x_ptr, out_ptr, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=mask, other=0.0)
    tl.store(out_ptr + row * width + column, silu_product(gate, up), mask=mask)


@triton.jit
def _gate_backward(grad_ptr, x_ptr, out_ptr, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    at = row * 2 * width + column
    gate = tl.load(x_ptr + at, mask=mask, other=0.0)
    up = widen(tl.load(x_ptr + at + width, mask=mask, other=0.0))
    grad = widen(tl.load(grad_ptr + row * width + column, mask=mask, other=0.0))
    g = widen(gate)
    power = exponential(-g)
    activated = widen(narrow(tl.div_rn(g, 1.0 + power), gate.dtype))
    share = tl.div_rn(1.0, 1.0 + power)
    inner = widen(narrow(grad * up, gate.dtype))
    tl.store(out_ptr + at, narrow(inner * share * (1.0 + g * (1.0 - share)), gate.dtype), mask=mask)
    tl.store(out_ptr + at + width, narrow(grad * activated, gate.dtype), mask=mask)


def gate_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of contiguous ``x (P, 2 D)`` in its dtype, of the contiguous gradient ``(P, D)`` of :func:`gate`."""
    rows, width = grad.shape
    out = torch.empty_like(x)
    if rows:
        _gate_backward[(rows, cdiv(width, 1024))](grad, x, out, width, TILE=1024, enable_fp_fusion=False)
    return out


def gate(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of contiguous ``x (P, 2 D)``, gate before up; ``(P, D)`` in its dtype."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    if rows:
        _gate[(rows, cdiv(width, 1024))](x, out, width, TILE=1024, enable_fp_fusion=False)
    return out
