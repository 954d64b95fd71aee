"""Grouped matrix product over the experts that were hit, with FP4 weights widened in registers.

``y[pair] = x[row of the pair] W[expert of the pair]^T``, scaled and rounded once. A tensor core wants 16 rows of its
first operand at least, and a decode step gives an expert only a few tokens; so the weight is the first operand and the
tokens are the columns, 8 at a time. The first operand lies in registers, which is where FP4 weights are widened: they
never exist anywhere as bfloat16.

A program of one warp multiplies 16 rows at a time by itself. Four warps could multiply 64 rows together, but then they
wait for their operand registers and for each other, and waiting is what a loop of a few hundred instructions cannot
afford. So tiles of few tokens take programs of one warp, as many as fit; those of a long prefill take four.

Weights are stored in chunks of 64 along the contraction axis, ``(experts, K / 64, N, 16)`` words, so that what a
program loads in a step is one piece of memory. Plain bfloat16 weights ``(experts, N, K)`` take the same kernel: that is
the arm against which FP4 is measured.

Inputs may come in two terms of one scale, ``(x[row] + second[row]) W^T``, where the sum would not be exact in bfloat16
(:mod:`tracefp4.quantizers.residual`). Every 64 weights of a row are read and widened once and multiplied with both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import narrow, product, widen
from tracefp4.kernels.routing import Route
from tracefp4.kernels.runtime import warp_groups
from tracefp4.kernels.sizes import cdiv
from tracefp4.kernels.words import NVFP4_SHIFT, weight_operands

_PROGRAMS = 1056
"""Programs of one warp that keep a GPU of 132 multiprocessors busy: two for each of its schedulers."""
_WIDE_PROGRAMS = 264
"""Programs of four warps for such a GPU, two a multiprocessor, so that one works while the other waits."""
_RESIDENT = 3300
"""Programs of one warp that such a GPU holds at once, 25 a multiprocessor."""
_SHORT = 1024
"""Columns of a matrix whose programs end after so few steps that it does not matter if some begin late."""


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """One projection of all experts of a layer."""

    values: Tensor
    """int16 ``(E, K / 64, N, 16)`` words, or bfloat16 ``(E, N, K)``."""
    scales: Tensor | None
    """uint8 ``(E, K / 64, N, 64 / block)``: E5M3 bytes, or those of ``lift`` if ``mx``; ``None`` for bfloat16."""
    alpha: Tensor | None
    """float32 ``(E,)``: global decode scale, or the factor of ``lift``; ``None`` stands for 1."""
    out: int
    """Rows of a matrix, ``N``."""
    inner: int
    """Columns, ``K``."""
    mx: bool = False
    block: int = 16


@dataclass(frozen=True, slots=True)
class Config:
    """Tile of a launch."""

    columns: int
    """Weight rows of a program, a power of two."""
    unroll: int
    """Chunks of 64 of a step; must divide ``K / 64``."""
    warps: int
    """1 or 2: every warp multiplies by itself. 4 or 8: groups of four share their multiplications (:meth:`joined`)."""
    stages: int
    """Steps in flight, the current one included."""
    registers: int | None = None
    """Limit for a thread, where the compiler's own choice would leave room for fewer programs."""

    @property
    def paired(self) -> bool:
        """Whether a thread has one weight row."""
        return self.columns == 32 * self.warps

    def joined(self, rows: int) -> bool:
        """Whether groups of four warps share multiplications of tiles of ``rows`` pairs, where a GPU has them."""
        return self.warps % 4 == 0 and rows > 8


@triton.jit
def _chunk(a, b, c, d, x, second, acc, COLUMNS: tl.constexpr, JOIN: tl.constexpr, SECOND: tl.constexpr):
    """Add the product of one chunk of weights, four groups of 16, with the chunk of inputs at ``x``, then ``second``.

    ``JOIN``: as one product of 64 by a warp group, which waits once for its operand registers; else as four of 16,
    which share no registers and need no wait.
    """
    if JOIN:
        both = tl.join(tl.join(a, b), tl.join(c, d))  # (COLUMNS, 16, inner, outer), group = 2 outer + inner
        whole = tl.reshape(tl.permute(both, (0, 3, 2, 1)), (COLUMNS, 64))
        acc = product(whole, tl.load(x), acc)
        if SECOND:
            acc = product(whole, tl.load(second), acc)
        return acc
    else:
        acc = _groups(a, b, c, d, x, acc)
        if SECOND:
            acc = _groups(a, b, c, d, second, acc)
        return acc


@triton.jit
def _groups(a, b, c, d, x, acc):
    """Add the products of four groups of 16 with the inputs at ``x``."""
    acc = product(a, tl.load(x), acc)
    acc = product(b, tl.load(x + 16), acc)
    acc = product(c, tl.load(x + 32), acc)
    return product(d, tl.load(x + 48), acc)


@triton.jit
def _grouped(
    x_ptr, second_ptr, x_scale_ptr, w_ptr, s_ptr, alpha_ptr, bias_ptr, order_ptr, tiles_ptr, out_ptr,
    N, K, x_stride, blocks,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, WHOLE: tl.constexpr,
    PAIRED: tl.constexpr, JOIN: tl.constexpr, FP4: tl.constexpr, MX: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr, PER_TOKEN: tl.constexpr, X_SCALE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert = tl.load(tiles_ptr + tile * 3)
    first, last = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    if first < last:
        place = first + tl.arange(0, ROWS)
        live = place < last
        # Rows past the last repeat it: their loads are the same bytes, their sums are not stored.
        pair = tl.load(order_ptr + tl.minimum(place, last - 1))
        row = pair // TOP_K if PER_TOKEN else pair
        column = tl.arange(0, COLUMNS)
        n = part * COLUMNS + column
        inside = n < N
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        if FP4:
            # Bases are numbers of the program and offsets those of a lane, so that a step adds to the bases alone.
            lane = tl.arange(0, 16)
            # With a way around the loop, ptxas lets every product wait for the one before.
            tl.assume(K >= 64 * UNROLL)
            base = expert.to(tl.int64) * (K // 64) * N + part * COLUMNS
            w, s = w_ptr + base * 16, s_ptr.to(tl.pointer_type(tl.int16 if BLOCK == 32 else tl.int32)) + base
            w_at = column[:, None] * 16 + lane[None, :]
            inner = tl.arange(0, 64) if JOIN else lane
            x_at = row[None, :].to(tl.int64) * x_stride + inner[:, None]
            x, second = x_ptr + x_at, second_ptr + x_at if SECOND else None
            for _ in tl.range(0, K // (64 * UNROLL)):
                for _step in tl.static_range(UNROLL):
                    word = tl.load(w + w_at) if WHOLE else tl.load(w + w_at, mask=inside[:, None], other=0)
                    a, b, c, d = weight_operands(word, s, inside, COLUMNS, WHOLE, PAIRED, MX, JOIN)
                    acc = _chunk(a, b, c, d, x, second, acc, COLUMNS, JOIN, SECOND)
                    w += N * 16
                    s += N
                    x += 64
                    if SECOND:
                        second += 64
        else:
            # Two terms take turns every 64 values, as above, or the order of additions would depend on the tile.
            wide: tl.constexpr = 64 if SECOND else 64 * UNROLL
            k = tl.arange(0, wide)
            w = w_ptr + (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
            x_at = row[None, :].to(tl.int64) * x_stride + k[:, None]
            x, second = x_ptr + x_at, second_ptr + x_at if SECOND else None
            for _ in tl.range(0, K // (64 * UNROLL)):
                for _step in tl.static_range(64 * UNROLL // wide):
                    left = tl.load(w) if WHOLE else tl.load(w, mask=inside[:, None], other=0.0)
                    acc = product(left, tl.load(x), acc)
                    w += wide
                    x += wide
                    if SECOND:
                        acc = product(left, tl.load(second), acc)
                        second += wide
        if FP4 and not MX:
            acc = acc * SHIFT
        if X_SCALE and ALPHA:
            acc = acc * (tl.load(x_scale_ptr + row) * tl.load(alpha_ptr + expert))[None, :]
        elif X_SCALE:
            acc = acc * tl.load(x_scale_ptr + row)[None, :]
        elif ALPHA:
            acc = acc * tl.load(alpha_ptr + expert)
        if BIAS:
            acc = acc + tl.load(bias_ptr + expert * N + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        at = out_ptr + pair[None, :].to(tl.int64) * N + n[:, None]
        tl.store(at, narrow(acc, out_ptr.dtype.element_ty), mask=inside[:, None] & live[None, :])


@triton.jit
def _weighted_sum(
    rows_ptr, weights_ptr, added_ptr, out_ptr, width, TOP_K: tl.constexpr, TILE: tl.constexpr, ADDED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    total = tl.zeros((TILE,), tl.float32)
    for slot in tl.static_range(TOP_K):
        part = tl.load(rows_ptr + (token * TOP_K + slot) * width + column, mask=mask, other=0.0)
        total += part.to(tl.float32) * tl.load(weights_ptr + token * TOP_K + slot).to(tl.float32)
    out = narrow(total, out_ptr.dtype.element_ty)
    if ADDED:
        added = tl.load(added_ptr + token * width + column, mask=mask, other=0.0)
        out = narrow(widen(out) + widen(added), out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * width + column, out, mask=mask)


def tile_rows(pairs: int, experts: int) -> int:
    """Pairs of a tile: about as many as an expert gets if routing is uniform, 8 to 64."""
    mean = pairs / max(experts, 1)
    return 8 if mean <= 4 else 16 if mean <= 16 else 32 if mean <= 48 else 64


def default_config(weight: ExpertWeight, route: Route, terms: int = 1) -> Config:
    """The tile for a batch, by what the host knows of it: the size of its tiles and a bound on their number.

    Two ``terms`` of the inputs take twice their shared memory and more registers, which narrows what fits (counted in
    compiled code, not measured).

    The result must not depend on the choice: every tile adds the products of a row up in the same order, and a test
    compares them on the device bit for bit.
    """
    if route.rows >= 32:
        plain = weight.scales is None
        # Few experts with many tokens each leave most of a GPU without a program, so programs get half the columns.
        few = route.most * weight.out < _WIDE_PROGRAMS * 128
        unroll = 1 if plain or terms * route.rows > 64 else _unroll(weight, 2)
        if few:  # what two programs of a multiprocessor have under way is all that is: as much as both have room for
            return Config(64, unroll, 4, 6 if unroll == 1 else 4)
        return Config(128, unroll, 4, 4 if plain else 3)
    # Measured on an H200: 16 rows where a row costs more instructions, which MXFP4 does.
    columns, narrowest = 64, 16 if weight.mx else 32
    while columns > narrowest and route.most * weight.out < _PROGRAMS * columns:
        columns //= 2  # a batch of few tiles: narrower programs, so that all of the GPU has work
    if columns < 64:
        plain = weight.scales is None
        return Config(columns, _unroll(weight, 128 // columns if plain else 64 // columns), 1, 3 if plain else 4)
    if weight.scales is None:
        return Config(128, 1, 4, 4)
    if route.most * weight.out <= _RESIDENT * columns:
        return Config(64, _unroll(weight, 2), 1, 3)
    if weight.inner <= _SHORT:
        # Measured on an H200, inner 768: at 16 tokens 1 to 2 us of 26 faster than with fewer registers, at 64 equal.
        return Config(64, 1, 1, 4 if weight.mx else 3)
    # 25 programs a multiprocessor: a projection of 128 experts x 1536 rows has no more, so none runs alone at last.
    # Two terms would spill at 80 registers; at 96 there are 21 programs.
    return Config(64, 1, 1, 3, registers=(80 if terms == 1 else 96) if route.rows == 8 else None)


def _unroll(weight: ExpertWeight, wanted: int) -> int:
    """The largest power of two up to ``wanted`` that divides the chunks of a row."""
    while wanted > 1 and weight.inner % (64 * wanted):
        wanted //= 2
    return wanted


def fits(weight: ExpertWeight) -> bool:
    """Whether the kernel takes a weight of this size."""
    return weight.inner % 64 == 0


def grouped_linear(
    x: Tensor,
    x_scale: Tensor | None,
    weight: ExpertWeight,
    route: Route,
    *,
    per_token: bool,
    dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    second: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Multiply every pair's row with its expert's matrix.

    Args:
        x: bfloat16 ``(T, K)`` if ``per_token``, else ``(P, K)`` with row ``pair``.
        x_scale: float32, one a row, or ``None``.
        weight: the projection.
        route: which expert computes which pairs.
        per_token: whether the slots of a token share a row.
        dtype: of the result.
        bias: ``(E, N)`` or ``None``.
        second: another term like ``x``, of the same scales, whose product is added; or ``None``.
        config: tile, or the default.

    Returns:
        ``(P, N)``, row ``pair``.
    """
    chosen = config or default_config(weight, route, 1 if second is None else 2)
    if x.stride(1) != 1:
        x = x.contiguous()
    if second is not None and second.stride() != x.stride():
        x, second = x.contiguous(), second.contiguous()
    out = torch.empty(route.order.numel(), weight.out, dtype=dtype, device=x.device)
    blocks, whole = cdiv(weight.out, chosen.columns), weight.out % chosen.columns == 0
    # Warp groups take 16 rows or more. Without them Triton mixes two groups of 16 FP4 weights in a product of 64, and
    # the order of additions would be another than that of smaller tiles.
    join = chosen.joined(route.rows) and warp_groups(x)
    _grouped[(route.tiles.shape[0] * blocks,)](
        x, second, x if x_scale is None else x_scale, weight.values,
        weight.values if weight.scales is None else weight.scales,
        *(x if t is None else t for t in (weight.alpha, bias)), route.order, route.tiles, out,
        weight.out, weight.inner, x.stride(0), blocks,
        TOP_K=route.top_k, ROWS=route.rows, COLUMNS=chosen.columns, UNROLL=chosen.unroll,
        WHOLE=whole, PAIRED=whole and chosen.paired, JOIN=join,
        FP4=weight.scales is not None, MX=weight.mx, BLOCK=weight.block, SHIFT=NVFP4_SHIFT,
        PER_TOKEN=per_token, X_SCALE=x_scale is not None, ALPHA=weight.alpha is not None, BIAS=bias is not None,
        SECOND=second is not None,
        num_warps=chosen.warps, num_stages=chosen.stages, maxnreg=chosen.registers, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def weighted_sum(rows: Tensor, weights: Tensor, added: Tensor | None = None) -> Tensor:
    """Sum over slots of ``weights[t, slot] * rows[t K + slot]`` in float32 and slot order, rounded once; ``(T, N)``.

    ``added (T, N)``, contiguous and of the dtype of ``rows``, is added to that and the sum rounded again.
    """
    tokens, top_k = weights.shape
    out = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    grid = (tokens, cdiv(rows.shape[1], 1024))
    _weighted_sum[grid](
        rows, weights.contiguous(), out if added is None else added, out, rows.shape[1],
        TOP_K=top_k, TILE=1024, ADDED=added is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return out
