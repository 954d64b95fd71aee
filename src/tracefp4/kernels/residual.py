"""Residual compensation in one pass: a row's codes, and those of what they missed on its worst channels.

A program takes a row, rounds it as :mod:`tracefp4.kernels.quantize` does, and keeps what is left of it in registers. Of
that it picks the channels with the largest magnitudes and rounds them with the same global scale. Both operands are
exact in bfloat16 (their sum is not), and a product takes them one after the other.

The largest of a row are found without a sort. Magnitudes are floats that are not negative, so their bits order them as
integers. Cutting the range of those integers into thirds, and counting each time how many channels reach either cut,
ends at a number that just the wanted count reaches, after twenty steps at most. Where channels are level the range
shrinks to one number that too many reach; of these the first channels count, and the same search finds the last of them
by its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.outputs import Fused, allocate, given_or
from tracefp4.kernels.place import Place
from tracefp4.kernels.quantize import load_blocks, record, round_blocks, warps_of, write
from tracefp4.kernels.rules import Rules
from tracefp4.kernels.scales import block_amax, global_forms, global_from_amax, row_top, scale_value
from tracefp4.kernels.sizes import next_power_of_2

WIDTH_LIMIT = 16384
"""Longest row: it is held in registers, beside what is left of it. The search counts in halves of a word."""


@triton.jit
def _reached(key, number, count):
    """A number that ``count`` of ``key`` reach, and how many do: more only where that many are level at it.

    ``key``: int32, of which ``number`` are not negative and take part; fewer than 2^15, so that one sum counts twice.
    """
    low, high, reach = 0, tl.max(key) + 1, number  # enough reach low, too few reach high
    while (reach != count) & (high - low > 1):
        third = (high - low + 2) // 3
        lower, upper = low + third, high - third
        both = tl.sum((key >= lower).to(tl.int32) + ((key >= upper).to(tl.int32) << 16))
        at_lower, at_upper = both & 0xFFFF, both >> 16
        high = tl.where(at_upper >= count, high, tl.where(at_lower >= count, upper, lower))
        low = tl.where(at_upper >= count, upper, tl.where(at_lower >= count, lower, low))
        reach = tl.where(at_upper >= count, at_upper, tl.where(at_lower >= count, at_lower, reach))
    return low, reach


@triton.jit
def _largest(x, column, width, count, SIZE: tl.constexpr):
    """Which ``count`` values of a row ``x`` are largest in magnitude: NaN before all, of equal ones the first channel.

    ``SIZE``: channels of the tile, from ``width`` on none of the row.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    key = tl.where(column < width, tl.minimum(bits, 0x7F800001), -1)  # a NaN is equal to any other
    low, reach = _reached(key, width, count)
    level = key == low
    equals = tl.sum(level.to(tl.int32))
    first, _ = _reached(tl.where(level, SIZE - column, -1), equals, count - (reach - equals))
    return (key > low) | (level & (SIZE - column >= first))


@triton.jit(do_not_specialize=["count", "record_start", "record_size"])
def _compensate(
    x_ptr, scales_ptr, global_ptr, decode_ptr, operand_ptr, second_ptr, planes_ptr, record_ptr, slots_ptr, tickets_ptr,
    width, count, x_stride, record_stride, record_start, record_size,
    TILE: tl.constexpr, GATED: tl.constexpr, BITS: tl.constexpr, VECTORS: tl.constexpr,
    BLOCK: tl.constexpr, EIGHT: tl.constexpr, E8M0: tl.constexpr, TIES: tl.constexpr, NEGATIVE_ZERO: tl.constexpr,
    SCALE_RULE: tl.constexpr, SCALE_FLOOR: tl.constexpr, FLOOR_BYTE: tl.constexpr, ZERO_BYTE: tl.constexpr,
    QUOTIENT: tl.constexpr, SCOPE: tl.constexpr, GLOBAL_RULE: tl.constexpr, GLOBAL_FORM: tl.constexpr,
    CONSTANT: tl.constexpr,
):  # fmt: skip
    """``VECTORS``: those of a token, if outcomes are recorded in rows; 0 if not, and planes are a tensor."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, TILE)
    inside = block * BLOCK < width
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = load_blocks(x_ptr + row * x_stride, block, width, TILE, BLOCK, GATED)

    amax = block_amax(x)
    g = 1.0
    if SCOPE == "token":
        g = global_from_amax(row_top(amax), GLOBAL_RULE, GLOBAL_FORM)
        tl.store(global_ptr + row, g)
    encode, decode = global_forms(g, SCOPE, GLOBAL_FORM, CONSTANT)
    if SCOPE == "token":
        tl.store(decode_ptr + row, decode)
    scale, code, level = round_blocks(
        x, amax, encode, decode,
        EIGHT, E8M0, TIES, NEGATIVE_ZERO, SCALE_RULE, SCALE_FLOOR, FLOOR_BYTE, ZERO_BYTE, QUOTIENT,
    )  # fmt: skip
    tl.store(scales_ptr + row * (width // BLOCK) + block, scale.to(tl.uint8), mask=inside)
    write(
        code, level, scale, decode, row, block, width, operand_ptr, operand_ptr, operand_ptr, operand_ptr, planes_ptr,
        TILE, False, False, True, False, 0 if VECTORS else BITS, BLOCK, E8M0,
    )  # fmt: skip
    if VECTORS:
        record(
            code, scale, g, row, block, width,
            record_ptr, slots_ptr, tickets_ptr, record_stride, record_start, record_size,
            TILE, BITS, VECTORS, BLOCK, SCOPE,
        )  # fmt: skip

    rest = x - level * scale_value(scale, E8M0)[:, None] * decode
    rest = tl.where(_largest(rest, column, width, count, TILE * BLOCK), rest, 0.0)
    scale, code, level = round_blocks(
        rest, block_amax(rest), encode, decode,
        EIGHT, E8M0, TIES, NEGATIVE_ZERO, SCALE_RULE, SCALE_FLOOR, FLOOR_BYTE, ZERO_BYTE, QUOTIENT,
    )  # fmt: skip
    write(
        code, level, scale, decode, row, block, width, second_ptr, second_ptr, second_ptr, second_ptr, second_ptr,
        TILE, False, False, True, False, 0, BLOCK, E8M0,
    )  # fmt: skip


def fits(x: Tensor, rules: Rules, gated: bool = False) -> bool:
    """Whether :func:`compensate` takes this tensor: rows of a moderate length whose scales are their own."""
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    return x.ndim == 2 and x.numel() > 0 and width <= WIDTH_LIMIT and rules.scope != "tensor"


def compensate(
    x: Tensor, rules: Rules, count: int, *, gated: bool = False, bits: int = 0, place: Place | None = None
) -> tuple[Fused, Tensor]:
    """Quantize ``x (R, D)`` and, of the ``count`` channels of each row where that missed most, what it missed.

    Args:
        x: bfloat16, float16 or float32; ``D`` a multiple of the block size.
        rules: arithmetic choices, of any scope but ``tensor``.
        count: channels of a row with a second term, 1 to ``D``.
        gated: ``x (R, 2 D)`` holds gate and up; quantize ``silu(gate) * up``, rounded as the eager code rounds it.
        bits: write this many bit planes of the first codes, 0 for none.
        place: where the first rounding is recorded, and bit planes nowhere else.

    Returns:
        The first rounding, with its operand, and the operand of the second, bfloat16 ``(R, D)``, under the same global
        scale.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = allocate(x, x.shape[:1], width, rules, False, False, True, None, 0 if place else bits)
    out.decode = torch.empty(rows, 1, dtype=torch.float32, device=x.device) if rules.scope == "token" else None
    second = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    tile, none = next_power_of_2(width // rules.block), out.scales  # a program has the whole row
    _compensate[(rows,)](
        x, out.scales, *(given_or(t, none) for t in (out.global_scale, out.decode, out.operand)), second,
        given_or(out.planes, none),
        *((none, none, none) if place is None else (place.rows, place.slots, place.tickets)),
        width, count, x.stride(0), *((0, 0, 0) if place is None else (place.rows.stride(0), place.start, place.size)),
        TILE=tile, GATED=gated, BITS=bits, VECTORS=0 if place is None else place.vectors,
        # Half as many values a thread as where a row is only rounded: what is left of them takes registers too.
        **rules.constants(), num_warps=warps_of(tile * rules.block, rows, costly=True), enable_fp_fusion=False,
    )  # fmt: skip
    return out, second
