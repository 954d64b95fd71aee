"""Quantize keys and values and store them in a paged pool, in one pass.

A program takes one vector (one head's K or V of one token), rounds it to nearest under the pool's constant global
scale, arranges its codes in words and writes words and scale bytes to the token's slot. Programs of K and of V share a
launch. Optionally keys are rotated first (RoPE), with the roundings of the eager code: both products and their sum are
rounded to the model's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.attention_decode import PagedKV
from tracefp4.kernels.elements import narrow, nearest, widen
from tracefp4.kernels.rules import Rules
from tracefp4.kernels.scales import block_amax, block_scale, block_unit, global_forms, normalized
from tracefp4.kernels.words import from_code, recoded

_PLAIN = Rules(16, True, "even", "keep", "floor", 0.0, 0, 0, "divide", "none", "amax", "encode", 1.0)
"""Any rules: those of a pool that rounds nothing."""


@triton.jit
def _append(
    k_ptr, v_ptr, cos_ptr, sin_ptr, slots_ptr, codes_ptr, scales_ptr,
    k_stride, k_head_stride, v_stride, v_head_stride, cos_stride, code_stride, scale_stride,
    HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, FP4: tl.constexpr,
    BLOCK: tl.constexpr, E8M0: tl.constexpr, TIES: tl.constexpr, NEGATIVE_ZERO: tl.constexpr,
    SCALE_RULE: tl.constexpr, SCALE_FLOOR: tl.constexpr, FLOOR_BYTE: tl.constexpr, ZERO_BYTE: tl.constexpr,
    QUOTIENT: tl.constexpr, SCOPE: tl.constexpr, GLOBAL_RULE: tl.constexpr, GLOBAL_FORM: tl.constexpr,
    CONSTANT: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) % (2 * HEADS)
    token, head, second = (tl.program_id(0) // (2 * HEADS)).to(tl.int64), place // 2, place % 2
    block = tl.arange(0, D // BLOCK)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if second == 0:
        source = k_ptr + token * k_stride + head * k_head_stride
    else:
        source = v_ptr + token * v_stride + head * v_head_stride
    raw = tl.load(source + column)
    if ROPE and second == 0:
        half = column < D // 2
        other = widen(tl.load(source + tl.where(half, column + D // 2, column - D // 2)))
        turned = tl.where(half, -other, other)
        cos = widen(tl.load(cos_ptr + token * cos_stride + column))
        sin = widen(tl.load(sin_ptr + token * cos_stride + column))
        kind = k_ptr.dtype.element_ty
        left, right = narrow(widen(raw) * cos, kind), narrow(turned * sin, kind)
        raw = narrow(widen(left) + widen(right), kind)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if FP4:
        x = widen(raw)
        encode, decode = global_forms(1.0, SCOPE, GLOBAL_FORM, CONSTANT)
        scale = block_scale(block_amax(x), encode, decode, E8M0, SCALE_RULE, SCALE_FLOOR, FLOOR_BYTE, ZERO_BYTE)
        z = normalized(x, block_unit(scale, encode, decode, E8M0, QUOTIENT), QUOTIENT)
        code = nearest(z, TIES, NEGATIVE_ZERO)
        if not E8M0:
            code = tl.where((scale == 0)[:, None], 0, code)
            scale = recoded(scale)
        groups = tl.reshape(code, (D // 64, 4, 16))
        word = tl.sum(from_code(groups, tl.arange(0, 4)[None, :, None]), axis=1)
        at = tl.arange(0, D // 64)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(codes_ptr + slot * code_stride + place * (D // 4) + at, word.to(tl.int16))
        tl.store(scales_ptr + slot * scale_stride + place * (D // BLOCK) + block, scale.to(tl.uint8))
    else:
        tl.store(codes_ptr + slot * code_stride + place * D + column, raw)


def append(
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    rules: Rules | None,
    slots: Tensor,
    rope: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Store ``k`` and ``v``, each ``(T, heads, D)``, of ``T`` tokens.

    Args:
        k: bfloat16, float16 or float32, last axis dense; any strides before it.
        v: likewise, in the same dtype.
        kv: the layer's pool; it stores them as they are if ``kv.scales`` is ``None``, in the pool's dtype.
        rules: of the pool, with a constant global scale or none; ``None`` if it stores plain values.
        slots: int64 ``(T,)``, each once.
        rope: ``(cos, sin)``, each ``(T, D)`` in the dtype of ``k``: rotate halves of ``k`` first.
    """
    tokens, heads, width = k.shape
    if not tokens:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    cos, sin = rope if rope is not None else (k, k)
    constants = (rules or _PLAIN).constants()
    _append[(tokens * heads * 2,)](
        k, v, cos, sin, slots, kv.codes, kv.codes if kv.scales is None else kv.scales,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), cos.stride(0), kv.codes.stride(0),
        0 if kv.scales is None else kv.scales.stride(0),
        HEADS=heads, D=width, ROPE=rope is not None, FP4=kv.scales is not None, **constants,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def pool_tensors(slots: int, heads: int, width: int, rules: Rules | None, device: torch.device) -> PagedKV:
    """Allocate one layer's pool for ``slots`` tokens; ``rules`` ``None`` for bfloat16."""
    if rules is None:
        return PagedKV(torch.zeros(slots, 2 * heads * width, dtype=torch.bfloat16, device=device), None, heads, width)
    codes = torch.zeros(slots, heads * width // 2, dtype=torch.int16, device=device)
    scales = torch.zeros(slots, 2 * heads * width // rules.block, dtype=torch.uint8, device=device)
    return PagedKV(codes, scales, heads, width, rules.e8m0, rules.block)
