"""Expert products of a training step: many rows an expert, forward and backward.

A training batch gives an expert hundreds of tokens, so the tensor cores bound it, not the weights' bytes: plain tiles
of 128 by 128, both operands in bfloat16, sums in fp32. Pairs stay in the order token, slot; a tile collects the rows of
its pairs through the order that :mod:`tracefp4.kernels.routing` made on the device, so nothing is sorted in memory,
nothing is padded, and nothing waits for the host.

``pair_product``    ``y[p] = scale x[row of p] W[e]^T``, rounded once; the gradient of ``x`` is the same product with
                    the weight's axes exchanged
``weight_product``  ``G[e] = sum over the pairs p of e of  grad[p]^T x[row of p]``: one program a tile of one expert's
                    gradient, so an expert that was not hit gets zeros and nothing is added atomically
``combine_backward``  gradients of the weighted sum over slots, in one pass
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import narrow, product, widen
from tracefp4.kernels.routing import Route
from tracefp4.kernels.sizes import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a launch, all powers of two."""

    columns: int = 128
    """Output columns of a program."""
    step: int = 64
    """Of the summed axis."""
    warps: int = 8
    stages: int = 3


ROWS = 128
"""Most pairs of a tile: what a caller routes with."""


@triton.jit
def _pairs(
    x_ptr, x_scale_ptr, w_ptr, alpha_ptr, order_ptr, tiles_ptr, out_ptr,
    N, K, x_stride, w_expert, w_n, w_k, blocks,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    PER_TOKEN: tl.constexpr, X_SCALE: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert = tl.load(tiles_ptr + tile * 3)
    first, last = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    if first < last:
        place = first + tl.arange(0, ROWS)
        live = place < last
        pair = tl.load(order_ptr + place, mask=live, other=0)
        row = pair // TOP_K if PER_TOKEN else pair
        n = part * COLUMNS + tl.arange(0, COLUMNS)
        inside = n < N
        k = tl.arange(0, STEP)
        x = x_ptr + row[:, None].to(tl.int64) * x_stride + k[None, :]
        w = w_ptr + expert.to(tl.int64) * w_expert + k[:, None] * w_k + n[None, :].to(tl.int64) * w_n
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for done in tl.range(0, K, STEP):
            if EVEN:
                left = tl.load(x, mask=live[:, None], other=0.0)
                right = tl.load(w, mask=inside[None, :], other=0.0)
            else:
                rest = k < K - done
                left = tl.load(x, mask=live[:, None] & rest[None, :], other=0.0)
                right = tl.load(w, mask=inside[None, :] & rest[:, None], other=0.0)
            acc = product(left, right, acc)
            x += STEP
            w += STEP * w_k
        if X_SCALE and ALPHA:
            acc = acc * (tl.load(x_scale_ptr + row, mask=live, other=0.0) * tl.load(alpha_ptr + expert))[:, None]
        elif X_SCALE:
            acc = acc * tl.load(x_scale_ptr + row, mask=live, other=0.0)[:, None]
        elif ALPHA:
            acc = acc * tl.load(alpha_ptr + expert)
        at = out_ptr + pair[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at, narrow(acc, out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _weights(
    grad_ptr, x_ptr, order_ptr, starts_ptr, out_ptr,
    N, K, x_stride, out_expert, out_n, out_k, n_blocks, k_blocks,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    expert, rest = program // (n_blocks * k_blocks), program % (n_blocks * k_blocks)
    n = (rest // k_blocks) * ROWS + tl.arange(0, ROWS)
    k = (rest % k_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    first, last = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(first, last, STEP):
        place = start + tl.arange(0, STEP)
        live = place < last
        pair = tl.load(order_ptr + place, mask=live, other=0)
        row = pair // TOP_K if PER_TOKEN else pair
        at = pair[None, :].to(tl.int64) * N + n[:, None]
        left = tl.load(grad_ptr + at, mask=live[None, :] & (n < N)[:, None], other=0.0)
        at = row[:, None].to(tl.int64) * x_stride + k[None, :]
        right = tl.load(x_ptr + at, mask=live[:, None] & (k < K)[None, :], other=0.0)
        acc = product(left, right, acc)
    at = out_ptr + expert.to(tl.int64) * out_expert + n[:, None].to(tl.int64) * out_n + k[None, :].to(tl.int64) * out_k
    tl.store(at, narrow(acc, out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def _combine_backward(
    grad_ptr, rows_ptr, weights_ptr, grad_rows_ptr, grad_weights_ptr, width,
    TOP_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    token = pair // TOP_K
    weight = tl.load(weights_ptr + pair).to(tl.float32)
    lane = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, width, TILE):
        column = start + lane
        mask = column < width
        grad = widen(tl.load(grad_ptr + token * width + column, mask=mask, other=0.0))
        total += grad * widen(tl.load(rows_ptr + pair * width + column, mask=mask, other=0.0))
        value = narrow(grad * weight, grad_rows_ptr.dtype.element_ty)
        tl.store(grad_rows_ptr + pair * width + column, value, mask=mask)
    tl.store(grad_weights_ptr + pair, narrow(tl.sum(total, axis=0), grad_weights_ptr.dtype.element_ty))


def pair_product(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    alpha: Tensor | None,
    route: Route,
    *,
    per_token: bool,
    dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """Multiply every pair's row with its expert's matrix, scale, and round once.

    Args:
        x: ``(T, K)`` if ``per_token``, else ``(P, K)`` with row ``pair``; last axis contiguous.
        x_scale: float32, one a row of ``x``, or ``None``.
        weight: ``(E, N, K)`` in the dtype of ``x``, any strides.
        alpha: float32 ``(E,)``, or ``None``.
        route: which expert computes which pairs.
        per_token: whether the slots of a token share a row.
        dtype: of the result.
        tile: sizes of the launch.

    Returns:
        ``(P, N)``, row ``pair``.
    """
    chosen = tile or Tile()
    _, out_width, width = weight.shape
    out = torch.empty(route.order.numel(), out_width, dtype=dtype, device=x.device)
    blocks = cdiv(out_width, chosen.columns)
    if not route.order.numel():
        return out
    _pairs[(route.tiles.shape[0] * blocks,)](
        x, x if x_scale is None else x_scale, weight, x if alpha is None else alpha, route.order, route.tiles, out,
        out_width, width, x.stride(0), *(weight.stride(axis) for axis in range(3)), blocks,
        TOP_K=route.top_k, ROWS=route.rows, COLUMNS=chosen.columns, STEP=chosen.step, EVEN=width % chosen.step == 0,
        PER_TOKEN=per_token, X_SCALE=x_scale is not None, ALPHA=alpha is not None,
        num_warps=chosen.warps, num_stages=chosen.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def weight_product(
    grad: Tensor, x: Tensor, route: Route, starts: Tensor, out: Tensor, *, per_token: bool, tile: Tile | None = None
) -> None:
    """Write every expert's ``grad^T x`` into ``out``; all of it is written.

    Args:
        grad: ``(P, N)``, row ``pair``, contiguous.
        x: as in :func:`pair_product`, unscaled.
        route: which expert computes which pairs.
        starts: from :func:`tracefp4.kernels.routing.route_layers`.
        out: ``(E, N, K)``, any strides, any float dtype.
        per_token: whether the slots of a token share a row.
        tile: sizes of the launch.
    """
    # Numbers of pairs take two stages and their rows two more, so with five those are on their way for a whole step.
    chosen = tile or Tile(stages=5)
    experts, rows, columns = out.shape
    n_blocks, k_blocks = cdiv(rows, ROWS), cdiv(columns, chosen.columns)
    _weights[(experts * n_blocks * k_blocks,)](
        grad, x, route.order, starts, out,
        rows, columns, x.stride(0), *(out.stride(axis) for axis in range(3)), n_blocks, k_blocks,
        TOP_K=route.top_k, ROWS=ROWS, COLUMNS=chosen.columns, STEP=chosen.step, PER_TOKEN=per_token,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip


def combine_backward(grad: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``sum over slots of weights[t, slot] * rows[t K + slot]``.

    Args:
        grad: ``(T, N)``.
        rows: ``(T K, N)``, contiguous.
        weights: ``(T, K)``.

    Returns:
        ``(T K, N)`` in the dtype of ``rows``, and ``(T, K)`` in that of ``weights``, summed in float32.
    """
    tokens, top_k = weights.shape
    weights = weights.contiguous()
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    tile = min(2048, next_power_of_2(rows.shape[1]))
    if tokens:
        _combine_backward[(tokens * top_k,)](
            grad.contiguous(), rows, weights, grad_rows, grad_weights, rows.shape[1],
            TOP_K=top_k, TILE=tile, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return grad_rows, grad_weights


def slot_sum(rows: Tensor, tokens: int) -> Tensor:
    """Sum a token's rows ``(T K, N)`` in float32 and slot order, rounded once to their dtype; ``(T, N)``."""
    out = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    top_k = rows.shape[0] // max(tokens, 1)
    if tokens:
        _slot_sum[(tokens, cdiv(rows.shape[1], 1024))](rows, out, rows.shape[1], TOP_K=top_k, TILE=1024)
    return out


@triton.jit
def _slot_sum(rows_ptr, out_ptr, width, TOP_K: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    total = tl.zeros((TILE,), tl.float32)
    for slot in tl.static_range(TOP_K):
        total += widen(tl.load(rows_ptr + (token * TOP_K + slot) * width + column, mask=mask, other=0.0))
    tl.store(out_ptr + token * width + column, narrow(total, out_ptr.dtype.element_ty), mask=mask)
