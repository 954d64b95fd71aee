"""The way into the experts of a decode step, in one launch: residual sum, norm, and the experts' rounding.

A decoder layer adds what attention made to the residual stream, normalises the sum, and its experts quantize that. As
launches of their own the last two cost as much as they would with a hundred times the tokens. A program takes one row:

    h = x + added             stored: the residual stream goes on with it
    n = weight * h * r        stored: a router and shared experts read it
    codes, scales of n        as :mod:`tracefp4.kernels.quantize` makes and stores them

Every intermediate is rounded where the eager code rounds it, so codes are those of the separate steps, up to the order
in which the squares of a row are added up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import narrow, widen
from tracefp4.kernels.norm import inverse_of, normalised
from tracefp4.kernels.outputs import Fused, allocate, given_or
from tracefp4.kernels.place import Place
from tracefp4.kernels.quantize import record, round_blocks, warps_of, write
from tracefp4.kernels.rules import Rules
from tracefp4.kernels.scales import block_amax, global_forms, global_from_amax, row_top
from tracefp4.kernels.sizes import next_power_of_2

WIDTH_LIMIT = 16384
"""Widest row: a program holds it in registers, twice."""


@triton.jit(do_not_specialize=["record_start", "record_size"])
def _enter(
    x_ptr, added_ptr, weight_ptr, hidden_ptr, normed_ptr, scales_ptr, new_global_ptr, operand_ptr, planes_ptr,
    decode_ptr, record_ptr, slots_ptr, tickets_ptr,
    width, eps, record_stride, record_start, record_size,
    TILE: tl.constexpr, BITS: tl.constexpr, VECTORS: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK: tl.constexpr, EIGHT: tl.constexpr, E8M0: tl.constexpr, TIES: tl.constexpr, NEGATIVE_ZERO: tl.constexpr,
    SCALE_RULE: tl.constexpr, SCALE_FLOOR: tl.constexpr, FLOOR_BYTE: tl.constexpr, ZERO_BYTE: tl.constexpr,
    QUOTIENT: tl.constexpr, SCOPE: tl.constexpr, GLOBAL_RULE: tl.constexpr, GLOBAL_FORM: tl.constexpr,
    CONSTANT: tl.constexpr,
):  # fmt: skip
    """``VECTORS``: 1 if outcomes are recorded in rows of tokens; 0 if not, and planes are a tensor."""
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    inside = block * BLOCK < width
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = tl.broadcast_to(inside[:, None], (TILE, BLOCK))
    at = row * width + column
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    kind: tl.constexpr = x.dtype
    hidden = narrow(widen(x) + widen(tl.load(added_ptr + at, mask=mask, other=0.0)), kind)
    tl.store(hidden_ptr + at, hidden, mask=mask)
    wide = widen(hidden)
    inverse = inverse_of(tl.sum(tl.sum(wide * wide, axis=1), axis=0), width, eps)
    normed = normalised(wide, inverse, tl.load(weight_ptr + column, mask=mask, other=0.0), kind, OFFSET)
    tl.store(normed_ptr + at, normed, mask=mask)

    values = widen(normed)
    amax = block_amax(values)
    g = 1.0
    if SCOPE == "token":
        g = global_from_amax(row_top(amax), GLOBAL_RULE, GLOBAL_FORM)
        tl.store(new_global_ptr + row, g)
    encode, decode = global_forms(g, SCOPE, GLOBAL_FORM, CONSTANT)
    if SCOPE == "token":
        tl.store(decode_ptr + row, decode)
    scale, code, level = round_blocks(
        values, amax, encode, decode,
        EIGHT, E8M0, TIES, NEGATIVE_ZERO, SCALE_RULE, SCALE_FLOOR, FLOOR_BYTE, ZERO_BYTE, QUOTIENT,
    )  # fmt: skip
    tl.store(scales_ptr + row * (width // BLOCK) + block, scale.to(tl.uint8), mask=inside)
    write(
        code, level, scale, decode, row, block, width,
        scales_ptr, scales_ptr, operand_ptr, scales_ptr, planes_ptr,
        TILE, False, False, True, False, 0 if VECTORS else BITS, BLOCK, E8M0,
    )  # fmt: skip
    if VECTORS:
        record(
            code, scale, g, row, block, width,
            record_ptr, slots_ptr, tickets_ptr, record_stride, record_start, record_size,
            TILE, BITS, VECTORS, BLOCK, SCOPE,
        )  # fmt: skip


def fits(x: Tensor, added: Tensor, weight: Tensor) -> bool:
    """Whether :func:`enter` takes these rows; what it may not quantize is for the caller to know."""
    alike = x.shape == added.shape and x.dtype is added.dtype is weight.dtype
    dense = x.is_contiguous() and added.is_contiguous() and weight.is_contiguous()
    return alike and dense and weight.shape == x.shape[-1:] and x.shape[-1] <= WIDTH_LIMIT and x.numel() > 0


def enter(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, rules: Rules, bits: int = 0, *,
    offset: bool = False, place: Place | None = None,
) -> tuple[Tensor, Tensor, Fused]:  # fmt: skip
    """Add, normalise and quantize rows for which :func:`fits` holds.

    Args:
        x: ``(..., D)``, bfloat16, float16 or float32; ``D`` a multiple of the block size.
        added: likewise.
        weight: ``(D,)`` of the norm, in the same dtype.
        eps: of the norm.
        rules: arithmetic choices; a global scale of each row is made here.
        bits: bit planes of codes to write, 0 for none.
        offset: the norm's factor is ``1 + weight``, and rounded once (:func:`tracefp4.kernels.norm.normalised`).
        place: where outcomes are recorded, one vector a token, and bit planes nowhere else.

    Returns:
        ``(x + added, its norm, what was made of that)``; the last with operands, and decode scales under ``token``.
    """
    width, lead = x.shape[-1], x.shape[:-1]
    hidden, normed = torch.empty_like(x), torch.empty_like(x)
    out = allocate(x, lead, width, rules, False, False, True, None, 0 if place else bits)
    if rules.scope == "token":
        out.decode = torch.empty((*lead, 1), dtype=torch.float32, device=x.device)
    tile, rows = next_power_of_2(width // rules.block), x.numel() // width
    none = out.scales  # never touched: the kernel was compiled without what is None
    _enter[(rows,)](
        x, added, weight, hidden, normed, out.scales,
        *(given_or(t, none) for t in (out.global_scale, out.operand, out.planes, out.decode)),
        *((none, none, none) if place is None else (place.rows, place.slots, place.tickets)),
        width, eps, *((0, 0, 0) if place is None else (place.rows.stride(0), place.start, place.size)),
        TILE=tile, BITS=bits, VECTORS=0 if place is None else place.vectors,
        OFFSET=offset, **rules.constants(), num_warps=warps_of(tile * rules.block, rows, costly=True),
        enable_fp_fusion=False,
    )  # fmt: skip
    return hidden, normed, out
