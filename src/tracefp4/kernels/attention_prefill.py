"""Prefill attention: many queries of each of several sequences over its pages of FP4 words (or bfloat16).

A program takes a tile of queries of one sequence and one KV head: rows are (query, group member), so a token of K and V
is widened once for all query heads that share it. The grid has as many tiles for each sequence as the one with the most
queries needs; programs of the others that find none end at once. The running maximum and sum of a row are kept in
float32, as in FlashAttention (Dao et al. 2022). Causal: query ``i`` stands at position ``context - queries + i``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.attention_decode import PagedKV
from tracefp4.kernels.elements import LOG2E, narrow, product
from tracefp4.kernels.runtime import shared_memory
from tracefp4.kernels.words import vectors


@triton.jit
def _prefill(
    q_ptr, codes_ptr, scales_ptr, slots_ptr, table_ptr, sinks_ptr, out_ptr,
    q_token_stride, q_head_stride, code_stride, scale_stride, factor, window, shift,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr,
    FP4: tl.constexpr, MX: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    piece = table_ptr + tl.program_id(2) * 4
    queries, context = tl.load(piece + 1).to(tl.int32), tl.load(piece + 3).to(tl.int32)
    if tl.program_id(0) * QUERIES >= queries * GROUP:
        return
    q_ptr += tl.load(piece) * q_token_stride
    out_ptr += tl.load(piece) * (HEADS * GROUP * D)
    slots_ptr += tl.load(piece + 2)
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    query, head = row // GROUP, h * GROUP + row % GROUP
    live = query < queries
    lane = tl.arange(0, D)
    q = tl.load(
        q_ptr + (query.to(tl.int64) * q_token_stride + head * q_head_stride)[:, None] + lane[None, :],
        mask=live[:, None],
        other=0.0,
    )
    last = context - queries + query  # position of each query
    first_query = (tl.program_id(0) * QUERIES) // GROUP
    last_query = tl.minimum((tl.program_id(0) * QUERIES + QUERIES - 1) // GROUP, queries - 1)
    start = tl.maximum(context - queries + first_query - window + 1, 0) // COLUMNS * COLUMNS
    stop = context - queries + last_query + 1
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        total = tl.full((QUERIES,), 1.0, tl.float32)
    out = tl.zeros((QUERIES, D), tl.float32)
    for first in tl.range(start, stop, COLUMNS):
        position = first + tl.arange(0, COLUMNS)
        inside = position < stop
        slot = tl.load(slots_ptr + position, mask=inside, other=0).to(tl.int64)
        code, scale = codes_ptr + slot * code_stride, scales_ptr + slot * scale_stride
        if FP4:
            code, scale = code + h * (D // 2), scale + 2 * h * (D // BLOCK)
            k = vectors(code, scale, inside, 0, COLUMNS, D, MX, BLOCK)
            v = vectors(code, scale, inside, 1, COLUMNS, D, MX, BLOCK)
        else:
            k = tl.load((code + 2 * h * D)[:, None] + lane[None, :], mask=inside[:, None], other=0.0)
            v = tl.load((code + (2 * h + 1) * D)[:, None] + lane[None, :], mask=inside[:, None], other=0.0)
        s = product(q, tl.trans(k), tl.zeros((QUERIES, COLUMNS), tl.float32)) * factor
        distance = last[:, None] - position[None, :]
        s = tl.where((distance >= 0) & (distance < window), s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        # A row may have seen nothing yet: its maximum is still -inf, and -inf - -inf is no number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p, keep = tl.exp2(s - base[:, None]), tl.exp2(top - base)
        total = total * keep + tl.sum(p, axis=1)
        out = product(narrow(p, tl.bfloat16), v, out * keep[:, None])
        top = higher
    out = out * (shift / total)[:, None]
    at = out_ptr + (query.to(tl.int64) * (HEADS * GROUP) + head)[:, None] * D + lane[None, :]
    tl.store(at, narrow(out, out_ptr.dtype.element_ty), mask=live[:, None])


def depth(width: int, fp4: bool, rows: int, columns: int, shared: int) -> int:
    """Stages of the pipeline of loads, for heads of ``width`` and ``shared`` bytes of shared memory for a program.

    Slots take two and what they point to two more, so with five K and V of a step are on their way during the whole
    step before; with three or four a step waits for K and V, though not for slots, and with two for one after the
    other. In bfloat16 products read K and V in shared memory, where those of three steps have to find room beside the
    queries. Heads of 64 in FP4 take three: five take registers that a second program needs, which has work meanwhile.
    """
    if fp4:
        return 5 if width > 64 else 3
    return 5 if 2 * width * (rows + 3 * 2 * columns) + 2048 <= shared else 4


def prefill_attention(
    q: Tensor,
    kv: PagedKV,
    slots: Tensor,
    table: Tensor,
    longest: int,
    scaling: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    *,
    rows: int = 128,
    columns: int = 64,
    warps: int = 8,
    stages: int | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of each sequence over all of it.

    Args:
        q: bfloat16 ``(T, Hq, D)``, last axis dense; the queries of each sequence are neighbours.
        kv: the layer's pool.
        slots: int64, slots of all tokens of each sequence in order; its queries are the last of them.
        table: int64 ``(n, 4)``: for each sequence its first query, its queries, its first slot in ``slots``, its slots.
        longest: most queries of a sequence.
        scaling: factor on the logits.
        window: sliding window in tokens, the current one included; ``None`` for all.
        sinks: ``(Hq,)`` attention-sink logits, or ``None``.
        rows: queries times group members of a program.
        columns: tokens that a program takes at a time.
        warps: warps of a program.
        stages: of the pipeline of loads; by default as many as :func:`depth` says.

    Returns:
        bfloat16 ``(T, Hq, D)``.
    """
    tokens, heads, width = q.shape
    if q.stride(2) != 1:
        q = q.contiguous()
    group = heads // kv.heads
    scales = kv.codes if kv.scales is None else kv.scales
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    stages = stages or depth(width, kv.scales is not None, rows, columns, shared_memory(q))
    _prefill[(triton.cdiv(longest * group, rows), kv.heads, table.shape[0])](
        q, kv.codes, scales, slots, table, q if sinks is None else sinks, out,
        q.stride(0), q.stride(1), kv.codes.stride(0), scales.stride(0),
        scaling * LOG2E.value * kv.shift, window or 2**30, kv.shift,
        HEADS=kv.heads, GROUP=group, D=width, QUERIES=rows, COLUMNS=columns,
        FP4=kv.scales is not None, MX=kv.mx, BLOCK=kv.block, SINKS=sinks is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
