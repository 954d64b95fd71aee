"""Quantize keys and values and store them in a paged pool, in one pass.

A program takes one vector (one head's K or V of one token), rounds it to nearest under the pool's constant global
scale, arranges its codes in words and writes words and scale bytes to the token's slot. Programs of K and of V share a
launch.

A layer has more to do before it may attend: queries and keys are normalised (in some models) and turned by the angles
of their position (RoPE), whole or in their first values. :func:`append_heads` does that in the same launch, from
projected rows wherever they lie, with the roundings of the eager code: after the norm and after its weight, both
products of the rotation and their sum. Only the squares of a norm are added up in an order of its own. Programs of
queries take several heads and write what attention reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.attention_decode import PagedKV
from tracefp4.kernels.elements import narrow, nearest, negated, widen
from tracefp4.kernels.norm import inverse_of, normalised
from tracefp4.kernels.rules import Rules
from tracefp4.kernels.scales import block_amax, block_scale, block_unit, global_forms, normalized, signs_under
from tracefp4.kernels.sizes import cdiv, next_power_of_2
from tracefp4.kernels.words import from_code, recoded

_PLAIN = Rules(16, False, True, "even", "keep", "floor", 0.0, 0, 0, "divide", "none", "amax", "encode", 1.0)
"""Any rules: those of a pool that rounds nothing."""
_ROWS = 4
"""Heads of queries that a program takes."""


@triton.jit
def _turned(
    row_ptr, mask, cos_ptr, sin_ptr, weight_ptr, eps, ROWS: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr,
    NORM: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Vectors of one token at ``row_ptr (ROWS,)``, normalised, their first ``TURNED`` values turned, ``(ROWS, D)``."""
    column = tl.arange(0, D)
    low = column < TURNED // 2
    swapped = tl.where(low, column + TURNED // 2, column - TURNED // 2)
    live = tl.broadcast_to(mask[:, None], (ROWS, D))
    x = tl.load(row_ptr[:, None] + column[None, :], mask=live, other=0.0)
    y = tl.load(row_ptr[:, None] + swapped[None, :], mask=live, other=0.0)
    kind: tl.constexpr = x.dtype
    if NORM:
        wide = widen(x)
        inverse = inverse_of(tl.sum(wide * wide, axis=1), D, eps)[:, None]
        x = normalised(wide, inverse, tl.load(weight_ptr + column)[None, :], kind, ADDED)
        y = normalised(widen(y), inverse, tl.load(weight_ptr + swapped)[None, :], kind, ADDED)
    # Beyond the angles there is nothing to read, and nothing to turn.
    cos = widen(tl.load(cos_ptr + column, mask=column < TURNED if TURNED < D else None))[None, :]
    sin = widen(tl.load(sin_ptr + column, mask=column < TURNED if TURNED < D else None))[None, :]
    other = tl.where(low[None, :], negated(widen(y)), widen(y))
    turned = narrow(widen(narrow(widen(x) * cos, kind)) + widen(narrow(other * sin, kind)), kind)
    return tl.where((column < TURNED)[None, :], turned, x) if TURNED < D else turned


@triton.jit
def _append(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, slots_ptr, codes_ptr, scales_ptr, out_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, turn_stride, code_stride, scale_stride,
    eps, QUERIES: tl.constexpr, ROWS: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr, ADDED: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, FP4: tl.constexpr,
    BLOCK: tl.constexpr, EIGHT: tl.constexpr, E8M0: tl.constexpr, TIES: tl.constexpr, NEGATIVE_ZERO: tl.constexpr,
    SCALE_RULE: tl.constexpr, SCALE_FLOOR: tl.constexpr, FLOOR_BYTE: tl.constexpr, ZERO_BYTE: tl.constexpr,
    QUOTIENT: tl.constexpr, SCOPE: tl.constexpr, GLOBAL_RULE: tl.constexpr, GLOBAL_FORM: tl.constexpr,
    CONSTANT: tl.constexpr,
):  # fmt: skip
    """``QUERIES``: heads of queries, taken ``ROWS`` at a time; 0 if keys are stored as they are."""
    each: tl.constexpr = 2 * HEADS + (QUERIES + ROWS - 1) // ROWS
    place, token = tl.program_id(0) % each, (tl.program_id(0) // each).to(tl.int64)
    cos_ptr += token * turn_stride
    sin_ptr += token * turn_stride
    if place < 2 * HEADS:
        head, column = place // 2, tl.arange(0, D)
        if place % 2 == 1:
            raw = tl.load(v_ptr + token * v_stride + head * v_head_stride + column)
        elif QUERIES:
            row = k_ptr + token * k_stride + head * k_head_stride + tl.arange(0, 1)
            whole = tl.arange(0, 1) == 0
            turned = _turned(row, whole, cos_ptr, sin_ptr, k_weight_ptr, eps, 1, D, TURNED, NORM, ADDED)
            raw = tl.reshape(turned, (D,))
        else:
            raw = tl.load(k_ptr + token * k_stride + head * k_head_stride + column)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        _store(
            raw, codes_ptr + slot * code_stride, scales_ptr + slot * scale_stride, place, D, FP4, BLOCK, E8M0, TIES,
            NEGATIVE_ZERO, SCALE_RULE, SCALE_FLOOR, FLOOR_BYTE, ZERO_BYTE, QUOTIENT, SCOPE, GLOBAL_FORM, CONSTANT,
        )  # fmt: skip
    elif QUERIES:
        query = (place - 2 * HEADS) * ROWS + tl.arange(0, ROWS)
        live = query < QUERIES
        queries = q_ptr + token * q_stride + query * q_head_stride
        turned = _turned(queries, live, cos_ptr, sin_ptr, q_weight_ptr, eps, ROWS, D, TURNED, NORM, ADDED)
        at = out_ptr + (token * QUERIES + query)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(at, turned, mask=tl.broadcast_to(live[:, None], (ROWS, D)))


@triton.jit
def _store(
    raw, codes_ptr, scales_ptr, place, D: tl.constexpr, FP4: tl.constexpr, BLOCK: tl.constexpr, E8M0: tl.constexpr,
    TIES: tl.constexpr, NEGATIVE_ZERO: tl.constexpr, SCALE_RULE: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    FLOOR_BYTE: tl.constexpr, ZERO_BYTE: tl.constexpr, QUOTIENT: tl.constexpr, SCOPE: tl.constexpr,
    GLOBAL_FORM: tl.constexpr, CONSTANT: tl.constexpr,
):  # fmt: skip
    """Round a vector ``raw (D,)`` and store it as the ``place``-th of a slot."""
    if FP4:
        block = tl.arange(0, D // BLOCK)
        x = widen(tl.reshape(raw, (D // BLOCK, BLOCK)))
        encode, decode = global_forms(1.0, SCOPE, GLOBAL_FORM, CONSTANT)
        scale = block_scale(block_amax(x), encode, decode, False, E8M0, SCALE_RULE, SCALE_FLOOR, FLOOR_BYTE, ZERO_BYTE)
        z = normalized(x, block_unit(scale, encode, decode, E8M0, QUOTIENT), E8M0, QUOTIENT)
        code, _ = nearest(z, signs_under(scale, E8M0)[:, None], False, TIES, NEGATIVE_ZERO)
        if not E8M0:
            scale = recoded(scale)
        groups = tl.reshape(code, (D // 64, 4, 16))
        word = tl.sum(from_code(groups, tl.arange(0, 4)[None, :, None]), axis=1)
        at = tl.arange(0, D // 64)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(codes_ptr + place * (D // 4) + at, word.to(tl.int16))
        tl.store(scales_ptr + place * (D // BLOCK) + block, scale.to(tl.uint8))
    else:
        tl.store(codes_ptr + place * D + tl.arange(0, D), raw)


def append(k: Tensor, v: Tensor, kv: PagedKV, rules: Rules | None, slots: Tensor) -> None:
    """Store ``k`` and ``v``, each ``(T, heads, D)``, of ``T`` tokens.

    Args:
        k: bfloat16, float16 or float32, last axis dense; any strides before it.
        v: likewise, in the same dtype.
        kv: the layer's pool; it stores them as they are if ``kv.scales`` is ``None``, in the pool's dtype.
        rules: of the pool, with a constant global scale or none; ``None`` if it stores plain values.
        slots: int64 ``(T,)``, each once.
    """
    _launch(k, k, v, kv, rules, slots, None, None, k)


def append_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    rules: Rules | None,
    slots: Tensor,
    turn: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float, bool] | None,
) -> Tensor:
    """:func:`append`, after queries and keys were normalised and turned.

    Args:
        q: ``(T, Hq, D)`` as it was projected, in the dtype of ``k``; heads may lie apart, as beside their gates.
        k: ``(T, heads, D)`` likewise.
        v: ``(T, heads, D)``.
        kv: see :func:`append`.
        rules: see :func:`append`.
        slots: see :func:`append`.
        turn: cosines and sines of each token's angles, each ``(T, R)`` or ``(1, R)`` in the dtype of ``k``: the first
            ``R`` values of a head are turned, an even number, ``D`` at most.
        norms: weights ``(D,)`` of queries and keys in the dtype of ``k``, the epsilon, and whether 1 is added to
            weights (:func:`tracefp4.kernels.norm.normalised`); ``None`` for none.

    Returns:
        Queries ``(T, Hq, D)``, contiguous.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q, k, v, kv, rules, slots, turn, norms, out)
    return out


def _launch(
    q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, rules: Rules | None, slots: Tensor,
    turn: tuple[Tensor, Tensor] | None, norms: tuple[Tensor, Tensor, float, bool] | None, out: Tensor,
) -> None:  # fmt: skip
    """Without ``turn`` there are no queries."""
    tokens, heads, width = k.shape
    if not tokens:
        return
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    cos, sin = (k, k) if turn is None else (x.contiguous() for x in turn)
    q_weight, k_weight, eps, added = (k, k, 0.0, False) if norms is None else norms
    queries = 0 if turn is None else q.shape[1]
    rows = min(_ROWS, next_power_of_2(max(queries, 1)))
    constants = (rules or _PLAIN).constants()
    _append[(tokens * (2 * heads + cdiv(queries, rows)),)](
        q, k, v, cos, sin, q_weight, k_weight, slots, kv.codes, kv.codes if kv.scales is None else kv.scales, out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        0 if turn is None or cos.shape[0] == 1 else cos.stride(0), kv.codes.stride(0),
        0 if kv.scales is None else kv.scales.stride(0), eps,
        QUERIES=queries, ROWS=rows, TURNED=width if turn is None else cos.shape[1], NORM=norms is not None, ADDED=added,
        HEADS=heads, D=width, FP4=kv.scales is not None, **constants, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def pool_tensors(slots: int, heads: int, width: int, rules: Rules | None, device: torch.device) -> PagedKV:
    """Allocate one layer's pool for ``slots`` tokens; ``rules`` ``None`` for bfloat16."""
    if rules is None:
        return PagedKV(torch.zeros(slots, 2 * heads * width, dtype=torch.bfloat16, device=device), None, heads, width)
    codes = torch.zeros(slots, heads * width // 2, dtype=torch.int16, device=device)
    scales = torch.zeros(slots, 2 * heads * width // rules.block, dtype=torch.uint8, device=device)
    return PagedKV(codes, scales, heads, width, rules.e8m0, rules.block)
