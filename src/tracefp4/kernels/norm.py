"""Root-mean-square normalisation in one pass, forward and backward, with the roundings of the eager code.

Transformers computes ``weight * narrow(x * rsqrt(mean(x^2) + eps))`` in eight steps, four times a layer (both norms of
the residual stream, those of queries and keys), and autograd answers with twice as many. The backward pass here is that
of the same formula: with ``n = narrow(x r)``, ``y = weight n`` and the gradient ``d`` of ``y``,

    g = narrow(d weight)        dx = g r - x r^3 mean(g x)        dweight = sum over rows of  d n

Sums run in float32 in an order of their own, so results equal the eager code's up to that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import narrow, widen
from tracefp4.kernels.sizes import cdiv, next_power_of_2

WIDTH_LIMIT = 16384
"""Widest row: a program holds whole rows in registers."""
_VALUES = 4096
"""Values of a tile, more if a row has more."""
_PROGRAMS = 264
"""Programs of the backward pass, two a multiprocessor: each adds up its share of the weight's gradient."""


@triton.jit
def inverse_of(squares, width, eps):
    """The factor of a row whose squares have this sum."""
    return tl.rsqrt(squares / width + eps)


@triton.jit
def normalised(wide, inverse, weight, kind: tl.constexpr, ADDED: tl.constexpr = False):
    """Values ``wide`` float32 times a row's factor and the weight, rounded to ``kind`` after each.

    ``ADDED``: times ``1 + weight`` in float32 instead, and rounded once, as Qwen3-Next and Qwen3.5 have it.
    """
    if ADDED:
        return narrow(wide * inverse * (1.0 + widen(weight)), kind)
    else:
        return narrow(widen(narrow(wide * inverse, kind)) * widen(weight), kind)


@triton.jit
def _norm(
    x_ptr, weight_ptr, out_ptr, inverse_ptr, rows, width, eps, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    wide = widen(x)
    inverse = inverse_of(tl.sum(wide * wide, axis=1), width, eps)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    tl.store(out_ptr + at, normalised(wide, inverse[:, None], weight[None, :], x.dtype), mask=mask)


@triton.jit
def _norm_backward(
    grad_ptr, x_ptr, weight_ptr, inverse_ptr, out_ptr, part_ptr, rows, width, steps,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, TILE)
    weight = widen(tl.load(weight_ptr + column, mask=column < width, other=0.0))
    total = tl.zeros((ROWS, TILE), tl.float32)
    for step in range(0, steps):
        row = ((step * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        grad = widen(tl.load(grad_ptr + at, mask=mask, other=0.0))
        inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)
        wide = widen(x)
        total += grad * widen(narrow(wide * inverse[:, None], x.dtype))
        inner = widen(narrow(grad * weight[None, :], x.dtype))
        slope = tl.sum(inner * wide, axis=1) / width * inverse * inverse * inverse
        value = inner * inverse[:, None] - wide * slope[:, None]
        tl.store(out_ptr + at, narrow(value, x.dtype), mask=mask)
    tl.store(part_ptr + tl.program_id(0) * width + column, tl.sum(total, axis=0), mask=column < width)


@triton.jit
def _add_parts(part_ptr, out_ptr, parts, width, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((STEP, COLUMNS), tl.float32)
    for first in range(0, parts, STEP):
        part = first + tl.arange(0, STEP)
        mask = (part < parts)[:, None] & (column < width)[None, :]
        total += tl.load(part_ptr + part[:, None] * width + column[None, :], mask=mask, other=0.0)
    value = narrow(tl.sum(total, axis=0), out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, value, mask=column < width)


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise the rows of ``x (..., D)``, contiguous, ``D`` at most :data:`WIDTH_LIMIT`.

    Returns:
        ``weight * x * r`` in the shape and dtype of ``x``, and ``r (rows,)`` float32 for :func:`norm_backward`.
    """
    out = torch.empty_like(x)
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        many, tile, warps = _sizes(width)
        _norm[(cdiv(rows, many),)](
            x, weight, out, inverse, rows, width, eps, ROWS=many, TILE=tile, num_warps=warps, enable_fp_fusion=False
        )  # fmt: skip
    return out, inverse


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and ``weight``, in their dtypes; ``grad`` and ``x`` contiguous and of one shape."""
    out, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    width, rows = x.shape[-1], inverse.numel()
    many, tile, warps = _sizes(width)
    programs = max(1, min(_PROGRAMS, cdiv(rows, many)))
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        grad, x, weight, inverse, out, parts, rows, width, cdiv(rows, many * programs),
        ROWS=many, TILE=tile, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    _add_parts[(cdiv(width, 32),)](parts, grad_weight, programs, width, STEP=32, COLUMNS=32, num_warps=4)
    return out, grad_weight


def _sizes(width: int) -> tuple[int, int, int]:
    """Rows of a tile, its columns, and warps of a program."""
    tile = next_power_of_2(width)
    return max(1, _VALUES // tile), tile, 4 if tile <= _VALUES else 8
