"""Decode attention over a paged pool that stores FP4 words (or bfloat16).

One query token a sequence. A program is a single warp and takes one sequence, one KV head with its group of query
heads, and one *split*, a fixed number of neighbouring tokens. It reads packed words and scale bytes and widens them in
registers; no dequantized K or V is ever written. Two products, both with the long axis first, because the group is
short::

    S   (tokens, group) = K (tokens, D) Q^T
    O^T (D, group)     += V^T P                    V^T by transposing words, before they are widened

A multiprocessor holds sixteen such programs, which never wait for each other: while one waits for memory or for its
tensor core, the others widen. (With four warps a program, the barriers between the warps took two thirds of the time.)
A second kernel adds the splits of a head up, 16 or 32 at a time. The length of a split does not depend on the batch,
and no atomic addition is involved, so a sequence's result is the same bits in every batch. Where block tables have room
for one split alone, its program writes the finished result, with the same roundings as the sum of that split alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import LOG2E, narrow, product, rounded_product
from tracefp4.kernels.words import NVFP4_SHIFT, vector_operands

PLACES = 2**31
"""Places that an int32 tells apart."""
LOWEST = tl.constexpr(-3e38)
"""A finite number below all logits: what nobody has attended to counts 0 beside it, and not a NaN."""


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's K and V as kernels read them."""

    codes: Tensor
    """``(slots, n)``: int16 words, or bfloat16 values if ``scales`` is ``None``; of each head its K, then its V."""
    scales: Tensor | None
    """uint8 ``(slots, m)``: E5M3 bytes, or E8M0 bytes if ``mx``; K and V of a head side by side, as their sectors of
    32 bytes are what memory delivers."""
    heads: int
    """KV heads."""
    width: int
    """Values of a vector, 64, 128 or 256; the same for K and V."""
    mx: bool = False
    block: int = 16
    page: int = 16
    """Slots of a page."""

    @property
    def shift(self) -> float:
        """Factor that a product with widened values lacks."""
        return 1.0 if self.mx or self.scales is None else NVFP4_SHIFT


def split_for(batch: int, kv: PagedKV) -> int:
    """Tokens of a split for an engine that decodes at most ``batch`` sequences at once from such a pool.

    Long splits write less that has to be added up; short ones give a small batch enough programs. What decides is the
    largest batch of an engine and the size of its pool, not the present batch, so that a sequence is the same bits in
    every batch.
    """
    if batch >= 32:
        return 1024
    # Measured on an H200, 16 sequences of 8K with 256, 512 and 1024: BF16 77.4, 74.1, 68.7 us; NVFP4 38.4, 34.4, 37.7;
    # MXFP4 44.4, 49.4, 69.6.
    if batch < 16:
        # A warp takes some 2 us for 32 tokens, so a pool that is small beside the GPU is cut into more programs.
        full = len(kv.codes) * kv.heads
        return next((span for span in (64, 128) if full <= 1024 * span), 256)
    if kv.mx:
        return 256
    return 1024 if kv.scales is None else 512


@triton.jit
def _tile(index: tl.constexpr, D: tl.constexpr, FP4: tl.constexpr):
    """Which of a vector's ``D`` values tile ``index`` has: of FP4 one code of every word, of bfloat16 64 in order."""
    if FP4:
        word = tl.arange(0, D // 4)
        return (word // 16) * 64 + index * 16 + word % 16
    else:
        return index * 64 + tl.arange(0, 64)


@triton.jit
def _tiles(
    code_ptr, scale_ptr, inside, ROWS: tl.constexpr, D: tl.constexpr, FP4: tl.constexpr, MX: tl.constexpr,
    BLOCK: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """K of tokens as tiles ``(ROWS, values)``, or V as ``(values, ROWS)`` if ``ACROSS``.

    ``code_ptr``, ``scale_ptr``: where each token's K begins, behind which its V lies; ``inside``: which tokens are
    there, or ``None`` for all. All of ``(ROWS,)``.
    """
    if FP4:
        return vector_operands(code_ptr, scale_ptr, inside, ACROSS, ROWS, D, MX, BLOCK, D == 64, ACROSS)
    else:
        mask, other, found = None, None, ()
        if inside is not None:
            mask, other = inside[None, :] if ACROSS else inside[:, None], 0.0
        for index in tl.static_range(D // 64):
            column = _tile(index, D, FP4)
            at = code_ptr[None, :] + (column + D)[:, None] if ACROSS else code_ptr[:, None] + column[None, :]
            found = found + (tl.load(at, mask=mask, other=other),)
        return found


@triton.jit
def _attend(
    first, stop, least, top, total, out, q, codes_ptr, scales_ptr, pages_ptr, code_stride, scale_stride, factor,
    COLUMNS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, FP4: tl.constexpr,
    MX: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens from ``first``, ``ROWS`` of them or, if ``MASKED``, those from ``least`` to ``stop``.

    ``ALIGNED``: a tile lies in one page, or begins where a page does.

    Returns:
        ``top``, ``total`` and ``out`` with them.
    """
    TILES: tl.constexpr = 4 if FP4 else D // 64
    lane = tl.arange(0, ROWS)
    position = first + lane
    inside = None
    if MASKED:
        inside = (position < stop) & (position >= least)
    if ALIGNED:
        # What differs between the tokens of a tile is the same in every step.
        at, rest = first // PAGE + lane // PAGE, first % PAGE + lane % PAGE
    else:
        at, rest = position // PAGE, position % PAGE
    page = tl.load(pages_ptr + at, mask=inside, other=0 if MASKED else None)
    slot = page.to(tl.int32 if NARROW else tl.int64) * PAGE + rest
    code, scale = codes_ptr + slot * code_stride, scales_ptr + slot * scale_stride
    k = _tiles(code, scale, inside, ROWS, D, FP4, MX, BLOCK, False)
    s = tl.zeros((ROWS, COLUMNS), tl.float32)
    for index in tl.static_range(TILES):
        s = product(k[index], q[index], s)
    s = s * factor
    if MASKED:
        s = tl.where(inside[:, None], s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, axis=0))
    p = tl.exp2(s - higher[None, :])
    keep = tl.exp2(top - higher)
    total = total * keep[None, :] + p
    v = _tiles(code, scale, inside, ROWS, D, FP4, MX, BLOCK, True)
    weight, added = narrow(p, tl.bfloat16), ()
    for index in tl.static_range(TILES):
        added = added + (product(v[index], weight, out[index] * keep[None, :]),)
    return higher, total, added


@triton.jit(do_not_specialize=["splits"])
def _split(
    q_ptr, codes_ptr, scales_ptr, pages_ptr, lengths_ptr, part_ptr, top_ptr, sum_ptr, sinks_ptr, out_ptr,
    pages_stride, code_stride, scale_stride, factor, window, splits, shift,
    HEADS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, FP4: tl.constexpr, MX: tl.constexpr, BLOCK: tl.constexpr,
    ALONE: tl.constexpr, SINKS: tl.constexpr, NARROW: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """``NARROW``: places of codes and scales in the pool fit into an int32. ``WINDOWED``: there is a ``window``."""
    TILES: tl.constexpr = 4 if FP4 else D // 64
    b, h = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    length = tl.load(lengths_ptr + b).to(tl.int32)
    start = tl.maximum(tl.program_id(1) * SPAN, (length - window) // ROWS * ROWS)
    stop = tl.minimum((tl.program_id(1) + 1) * SPAN, length)
    group = tl.arange(0, COLUMNS)
    live = group < GROUP
    head = (b * HEADS + h) * GROUP
    q = ()
    for index in tl.static_range(TILES):
        at = q_ptr + (head + group)[None, :] * D + _tile(index, D, FP4)[:, None]
        q = q + (tl.load(at, mask=live[None, :], other=0.0),)
    top = tl.full((COLUMNS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    out = (tl.zeros((D // TILES, COLUMNS), tl.float32),) * TILES
    step: tl.constexpr = D // 4 if FP4 else D
    codes_ptr, scales_ptr, pages_ptr = (
        codes_ptr + 2 * h * step, scales_ptr + 2 * h * (D // BLOCK), pages_ptr + b * pages_stride
    )  # fmt: skip
    # Whole tiles need no mask, which is a tenth of what a step asks of the integer units; the last one does.
    even: tl.constexpr = SPAN % ROWS == 0
    aligned: tl.constexpr = even and (ROWS % PAGE == 0 or PAGE % ROWS == 0)
    whole = tl.maximum(start, stop // ROWS * ROWS) if even and not WINDOWED else start
    for first in tl.range(start, whole, ROWS):
        top, total, out = _attend(
            first, stop, 0, top, total, out, q, codes_ptr, scales_ptr, pages_ptr, code_stride, scale_stride, factor,
            COLUMNS, D, PAGE, ROWS, FP4, MX, BLOCK, NARROW, aligned, False,
        )  # fmt: skip
    for first in tl.range(whole, stop, ROWS):
        top, total, out = _attend(
            first, stop, length - window, top, total, out, q, codes_ptr, scales_ptr, pages_ptr, code_stride,
            scale_stride, factor, COLUMNS, D, PAGE, ROWS, FP4, MX, BLOCK, NARROW, aligned, True,
        )  # fmt: skip
    sums = tl.sum(total, axis=0)
    mask = tl.broadcast_to(live[None, :], (D // TILES, COLUMNS))
    if ALONE:
        # What _combine does with a single split, to the last bit.
        if SINKS:
            sink = tl.load(sinks_ptr + h * GROUP + group, mask=live, other=0.0).to(tl.float32) * LOG2E
            higher = tl.maximum(sink, top)
            add = tl.exp2(top - higher)
            sums = tl.exp2(sink - higher) + rounded_product(sums, add)
        for index in tl.static_range(TILES):
            value = out[index] * add[None, :] if SINKS else out[index]
            at = out_ptr + (head + group)[None, :] * D + _tile(index, D, FP4)[:, None]
            tl.store(at, narrow(value * shift / sums[None, :], out_ptr.dtype.element_ty), mask=mask)
    else:
        place = (head + group) * splits + tl.program_id(1)
        tl.store(top_ptr + place, top, mask=live)
        tl.store(sum_ptr + place, sums, mask=live)
        if start < stop:
            for index in tl.static_range(TILES):
                row = _tile(index, D, FP4)
                tl.store(part_ptr + place[None, :] * D + row[:, None], out[index], mask=mask)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    part_ptr, top_ptr, sum_ptr, sinks_ptr, out_ptr, splits, heads, shift,
    D: tl.constexpr, SINKS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add the splits of one query head up, ``TOGETHER`` of them at once.

    Which splits are added with which depends on their number in the sequence alone, never on how many there are: those
    that have no token add a zero.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    top, total, out = float("-inf"), 0.0, tl.zeros((D,), tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + row % heads).to(tl.float32) * LOG2E
        total = 1.0
    for first in range(0, splits, TOGETHER):
        split = first + tl.arange(0, TOGETHER)
        place = row * splits + split
        tops = tl.load(top_ptr + place, mask=split < splits, other=float("-inf"))
        live = tops > float("-inf")
        sums = tl.load(sum_ptr + place, mask=live, other=0.0)
        mask = tl.broadcast_to(live[:, None], (TOGETHER, D))
        parts = tl.load(part_ptr + place[:, None] * D + column[None, :], mask=mask, other=0.0)
        higher = tl.maximum(tl.maximum(top, tl.max(tops, axis=0)), LOWEST)
        add = tl.exp2(tops - higher)
        keep = tl.exp2(top - higher)
        total = rounded_product(total, keep) + tl.sum(rounded_product(sums, add), axis=0)
        out = out * keep + tl.sum(parts * add[:, None], axis=0)
        top = higher
    tl.store(out_ptr + row * D + column, narrow(out * shift / total, out_ptr.dtype.element_ty))


def fits(q: Tensor, kv: PagedKV) -> bool:
    """Whether :func:`decode_attention` takes these shapes and dtypes."""
    return q.dtype is torch.bfloat16 and kv.width in (64, 128, 256) and q.shape[1] // kv.heads <= 64


def narrow_places(kv: PagedKV) -> bool:
    """Whether an int32 reaches every code and scale; a pool may be cut from rows that hold both."""
    strides = [part.stride(0) for part in (kv.codes, kv.scales) if part is not None]
    return len(kv.codes) * max(strides) <= PLACES


def decode_attention(
    q: Tensor,
    kv: PagedKV,
    pages: Tensor,
    lengths: Tensor,
    scaling: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    *,
    span: int = 1024,
    rows: int = 32,
    warps: int = 1,
    stages: int | None = None,
    registers: int | None = None,
) -> Tensor:
    """Attention of one query token of each sequence over its pages.

    Args:
        q: bfloat16 ``(B, Hq, D)``.
        kv: the layer's pool.
        pages: int32 or int64 ``(B, W)`` block tables; entries past a sequence's end are not read.
        lengths: int32 or int64 ``(B,)``: tokens to attend to, at least 1 and at most ``W * page``.
        scaling: factor on the logits.
        window: sliding window in tokens, the current one included; ``None`` for all.
        sinks: ``(Hq,)`` attention-sink logits, or ``None``.
        span: tokens of a split, see :func:`split_for`; it decides the order of additions.
        rows: tokens that a program takes at a time.
        warps: warps of a program.
        stages: stages of the pipeline of loads; block tables and what they point to take one each.
        registers: the most of a thread, so that more programs fit on a multiprocessor; by default 128 where ptxas
            would take a few more and lose one of sixteen.

    Returns:
        bfloat16 ``(B, Hq, D)``.
    """
    batch, heads, width = q.shape
    q, group = q.contiguous(), heads // kv.heads
    splits = triton.cdiv(pages.shape[1] * kv.page, span)
    out, alone = torch.empty_like(q), splits == 1
    part = top = total = out
    if not alone:
        part = torch.empty(batch, heads, splits, width, dtype=torch.float32, device=q.device)
        top, total = torch.empty(2, batch, heads, splits, dtype=torch.float32, device=q.device)
    added = out if sinks is None else sinks
    fp4 = kv.scales is not None
    stages = stages or (5 if fp4 else 3)
    columns = max(8, triton.next_power_of_2(group))
    if registers is None and kv.mx and width == 128 and columns == 8:
        # ptxas took 130 once, and takes 126 to 128 now: beyond, fifteen programs fit. 64 sequences of 8K in splits of
        # 1024 are sixteen a multiprocessor of an H200, whose last one then waits for another: 170 us instead of 135.
        registers = 128
    scales = kv.scales if kv.scales is not None else kv.codes
    _split[(batch * kv.heads, splits)](
        q, kv.codes, scales, pages, lengths, part, top, total, added, out,
        pages.stride(0), kv.codes.stride(0), scales.stride(0), scaling * LOG2E.value * kv.shift, window or 2**30,
        splits, kv.shift,
        HEADS=kv.heads, GROUP=group, COLUMNS=columns, D=width, PAGE=kv.page, SPAN=span,
        ROWS=rows, FP4=fp4, MX=kv.mx, BLOCK=kv.block, ALONE=alone, SINKS=alone and sinks is not None,
        NARROW=narrow_places(kv), WINDOWED=window is not None, num_warps=warps, num_stages=stages, maxnreg=registers,
    )  # fmt: skip
    if not alone:
        together = 16 if span > 128 else 32  # the order of additions may depend on nothing that changes with the batch
        _combine[(batch * heads,)](
            part, top, total, added, out, splits, heads, kv.shift,
            D=width, SINKS=sinks is not None, TOGETHER=together, num_warps=width * together // 1024,
        )  # fmt: skip
    return out
