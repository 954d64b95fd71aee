"""One pass from values to everything that a site wants of them.

A program takes one row (or a piece of one, where no scale spans the row) as a tile ``(blocks, block)``, finds block
maxima, the row's global scale, scale bytes and codes, and writes what was asked for:

    codes     one a byte              scales    one byte a block          operand  ``code x block scale``, bfloat16
    packed    two a byte (E2M1)       global    one float32 a row         values   operand x global scale, any dtype
    planes    the low bits of each code, as :mod:`tracefp4.guidance.codec` stores them
    a record  planes, scale bytes, global scale and a ticket side by side, in the row of the token's slot

The equal but eager code reads and writes the tensor a dozen times. Where many rows share a global scale, one pass more
finds it first (:func:`global_scales`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import narrow, nearest, widen
from tracefp4.kernels.gate import silu_product
from tracefp4.kernels.outputs import Fused, allocate, given_or
from tracefp4.kernels.place import Place
from tracefp4.kernels.rules import Rules
from tracefp4.kernels.scales import (
    block_amax,
    block_scale,
    block_unit,
    global_forms,
    global_from_amax,
    normalized,
    row_top,
    scale_value,
    signs_under,
)
from tracefp4.kernels.sizes import cdiv, next_power_of_2

ROW_LIMIT = 32768
"""Longest row that shares a global scale: it is held in registers."""
_PIECE = 2048
"""Values a program takes of a longer row without such a scale."""
GRID_LIMIT = 65535
"""Most programs along the second axis of a CUDA grid; along the first there may be 2^31 - 1."""
_WARPS = 8448
"""Warps that a GPU of 132 multiprocessors holds at once."""


@triton.jit(do_not_specialize=["record_start", "record_size"])
def _quantize(
    x_ptr, global_ptr, codes_ptr, packed_ptr, scales_ptr, new_global_ptr, operand_ptr, values_ptr, planes_ptr,
    decode_ptr, record_ptr, slots_ptr, tickets_ptr,
    width, x_stride, x_groups, x_group_stride, per_global, record_stride, record_start, record_size,
    TILE: tl.constexpr, GATED: tl.constexpr, GIVEN: tl.constexpr, DECODE: tl.constexpr,
    CODES: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, VALUES: tl.constexpr, BITS: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr, EIGHT: tl.constexpr, E8M0: tl.constexpr, TIES: tl.constexpr, NEGATIVE_ZERO: tl.constexpr,
    SCALE_RULE: tl.constexpr, SCALE_FLOOR: tl.constexpr, FLOOR_BYTE: tl.constexpr, ZERO_BYTE: tl.constexpr,
    QUOTIENT: tl.constexpr, SCOPE: tl.constexpr, GLOBAL_RULE: tl.constexpr, GLOBAL_FORM: tl.constexpr,
    CONSTANT: tl.constexpr,
):  # fmt: skip
    """``VECTORS``: those of a token, if outcomes are recorded in rows; 0 if not, and planes are a tensor."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = block * BLOCK < width
    start = (row // x_groups) * x_group_stride + (row % x_groups) * x_stride
    x = load_blocks(x_ptr + start, block, width, TILE, BLOCK, GATED)

    amax = block_amax(x)
    if GIVEN:
        g = tl.load(global_ptr + row // per_global)
    elif SCOPE == "token":
        g = global_from_amax(row_top(amax), GLOBAL_RULE, GLOBAL_FORM)
        tl.store(new_global_ptr + row, g)
    else:
        g = 1.0
    encode, decode = global_forms(g, SCOPE, GLOBAL_FORM, CONSTANT)
    if DECODE:
        tl.store(decode_ptr + row, decode)
    scale, code, level = round_blocks(
        x, amax, encode, decode,
        EIGHT, E8M0, TIES, NEGATIVE_ZERO, SCALE_RULE, SCALE_FLOOR, FLOOR_BYTE, ZERO_BYTE, QUOTIENT,
    )  # fmt: skip
    tl.store(scales_ptr + row * (width // BLOCK) + block, scale.to(tl.uint8), mask=inside)
    write(
        code, level, scale, decode, row, block, width,
        codes_ptr, packed_ptr, operand_ptr, values_ptr, planes_ptr,
        TILE, CODES, PACKED, OPERAND, VALUES, 0 if VECTORS else BITS, BLOCK, E8M0,
    )  # fmt: skip
    if VECTORS:
        record(
            code, scale, g, row, block, width,
            record_ptr, slots_ptr, tickets_ptr, record_stride, record_start, record_size,
            TILE, BITS, VECTORS, BLOCK, SCOPE,
        )  # fmt: skip


@triton.jit
def load_blocks(x_ptr, block, width, TILE: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr):
    """A tile ``(TILE, BLOCK)`` of the row at ``x_ptr``, float32, 0 past its end.

    ``GATED``: of ``silu(gate) * up``, rounded as the eager code rounds it; ``up`` follows ``gate``.
    """
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = tl.broadcast_to((block * BLOCK < width)[:, None], (TILE, BLOCK))
    x = tl.load(x_ptr + column, mask=mask, other=0.0)
    if GATED:
        x = silu_product(x, tl.load(x_ptr + width + column, mask=mask, other=0.0))
    return widen(x)


@triton.jit
def round_blocks(
    x, amax, encode, decode,
    EIGHT: tl.constexpr, E8M0: tl.constexpr, TIES: tl.constexpr, NEGATIVE_ZERO: tl.constexpr, SCALE_RULE: tl.constexpr,
    SCALE_FLOOR: tl.constexpr, FLOOR_BYTE: tl.constexpr, ZERO_BYTE: tl.constexpr, QUOTIENT: tl.constexpr,
):  # fmt: skip
    """Scale bytes ``(TILE,)``, nearest codes of ``x (TILE, BLOCK)`` under a global scale, and their values, float32.

    ``amax``: largest magnitude of each block, as a bit pattern.
    """
    scale = block_scale(amax, encode, decode, EIGHT, E8M0, SCALE_RULE, SCALE_FLOOR, FLOOR_BYTE, ZERO_BYTE)
    z = normalized(x, block_unit(scale, encode, decode, E8M0, QUOTIENT), E8M0, QUOTIENT)
    code, level = nearest(z, signs_under(scale, E8M0)[:, None], EIGHT, TIES, NEGATIVE_ZERO)
    return scale, code, level


@triton.jit
def record(
    code, scale, g, row, block, width,
    record_ptr, slots_ptr, tickets_ptr, record_stride, record_start, record_size,
    TILE: tl.constexpr, BITS: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr, SCOPE: tl.constexpr,
):  # fmt: skip
    """Put a tile of a vector into the row of its token (:class:`tracefp4.kernels.place.Place`)."""
    slot = tl.load(slots_ptr + row // VECTORS).to(tl.int64)
    at = record_ptr + slot * record_stride + record_start + (row % VECTORS) * record_size
    _store_planes(code, at, block, width, TILE, BITS, BLOCK)
    at += BITS * width // 8
    tl.store(at + block, scale.to(tl.uint8), mask=block * BLOCK < width)
    if tl.program_id(1) == 0:
        at += width // BLOCK
        if SCOPE == "token":
            _store_word(at, g.to(tl.int32, bitcast=True))
            at += 4
        _store_word(at, tl.load(tickets_ptr + row // VECTORS))


@triton.jit
def _store_word(at, word):
    """The four bytes of an int32, lowest first, where it need not be aligned."""
    byte = tl.arange(0, 4)
    tl.store(at + byte, ((word >> (8 * byte)) & 255).to(tl.uint8))


@triton.jit
def _store_planes(code, at, block, width, TILE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The bit planes of a tile of a vector whose planes begin at ``at``."""
    eights = tl.reshape(code, (TILE, BLOCK // 8, 8))
    byte = block[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    inside = tl.broadcast_to((block * BLOCK < width)[:, None], (TILE, BLOCK // 8))
    shift = tl.arange(0, 8)[None, None, :]
    for bit in tl.static_range(BITS):
        plane = tl.sum(((eights >> bit) & 1) << shift, axis=2)
        tl.store(at + bit * (width // 8) + byte, plane.to(tl.uint8), mask=inside)


@triton.jit
def write(
    code, level, scale, decode, row, block, width,
    codes_ptr, packed_ptr, operand_ptr, values_ptr, planes_ptr,
    TILE: tl.constexpr, CODES: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, VALUES: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    """Store a tile ``(TILE, BLOCK)`` and its scale bytes ``(TILE,)`` in the forms asked for.

    ``code`` int32, ``level`` float32: its value before the block scale. Operands and values need no codes, so where
    nothing else is stored none are made.
    """
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = tl.broadcast_to((block * BLOCK < width)[:, None], (TILE, BLOCK))
    if CODES:
        tl.store(codes_ptr + row * width + column, code.to(tl.uint8), mask=mask)
    if PACKED:
        even, odd = tl.split(tl.reshape(code, (TILE, BLOCK // 2, 2)))
        byte = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        inside = tl.broadcast_to((block * BLOCK < width)[:, None], (TILE, BLOCK // 2))
        tl.store(packed_ptr + row * (width // 2) + byte, (even | (odd << 4)).to(tl.uint8), mask=inside)
    if OPERAND or VALUES:
        product = level * scale_value(scale, E8M0)[:, None]
        if OPERAND:
            tl.store(operand_ptr + row * width + column, narrow(product, tl.bfloat16), mask=mask)
        if VALUES:
            value = product * decode
            tl.store(values_ptr + row * width + column, narrow(value, values_ptr.dtype.element_ty), mask=mask)
    if BITS:
        _store_planes(code, planes_ptr + row * (BITS * width // 8), block, width, TILE, BITS, BLOCK)


@triton.jit
def _largest(
    x_ptr, top_ptr, width, x_stride, x_groups, x_group_stride, per_global, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Raise the bit pattern at ``top_ptr`` of a row's global scale to the largest finite magnitude of a piece of it."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    start = (row // x_groups) * x_group_stride + (row % x_groups) * x_stride
    amax = block_amax(load_blocks(x_ptr + start, block, width, TILE, BLOCK, False))
    tl.atomic_max(top_ptr + row // per_global, row_top(amax).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _finish(top_ptr, GLOBAL_RULE: tl.constexpr, GLOBAL_FORM: tl.constexpr):
    """Put a global scale in the place of the largest magnitude that it is made from."""
    at = top_ptr + tl.program_id(0)
    g = global_from_amax(tl.load(at).to(tl.float32, bitcast=True), GLOBAL_RULE, GLOBAL_FORM)
    tl.store(at, g.to(tl.int32, bitcast=True))


def global_scales(x: Tensor, rules: Rules, groups: int) -> Tensor:
    """Global scales of tensors ``x (..., D)`` whose leading rows fall into ``groups`` of equally many.

    Returns:
        float32 ``(groups,)`` in primary form, made as under scope ``token``: a block with a NaN does not count.
    """
    width = x.shape[-1]
    x, stride, rows_of_group, group_stride = _rows(x)
    rows = x.numel() // width
    per_global = rows // groups
    if x.is_contiguous() and per_global * width <= GRID_LIMIT * _PIECE:  # one long row a group: full tiles
        width, rows, per_global = per_global * width, groups, 1
        stride, rows_of_group, group_stride = width, groups, 0
    tile = min(next_power_of_2(width // rules.block), _PIECE // rules.block)
    top = torch.zeros(groups, dtype=torch.int32, device=x.device)
    _largest[(rows, cdiv(width // rules.block, tile))](
        x, top, width, stride, rows_of_group, group_stride, per_global, TILE=tile, BLOCK=rules.block, num_warps=4
    )  # fmt: skip
    _finish[(groups,)](
        top, GLOBAL_RULE=rules.global_rule, GLOBAL_FORM=rules.global_form, num_warps=1, enable_fp_fusion=False
    )  # fmt: skip
    return top.view(torch.float32)


def fits(x: Tensor, rules: Rules, gated: bool = False) -> bool:
    """Whether :func:`quantize` takes this tensor: it has values, and a row with one global scale is short enough."""
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    return x.numel() > 0 and (rules.scope != "token" or width <= ROW_LIMIT)


def quantize(
    x: Tensor,
    rules: Rules,
    global_scale: Tensor | None = None,
    *,
    gated: bool = False,
    codes: bool = False,
    packed: bool = False,
    operand: bool | Tensor = False,
    values: torch.dtype | None = None,
    bits: int = 0,
    decode: bool = False,
    place: Place | None = None,
) -> Fused:
    """Quantize ``x (..., D)`` in one pass.

    Args:
        x: bfloat16, float16 or float32; ``D`` a multiple of the block size.
        rules: arithmetic choices.
        global_scale: float32, one for each group of equally many leading rows, contiguous, in primary form. Needed
            under scope ``tensor``; under ``token`` made from ``x`` if ``None``.
        gated: ``x (..., 2 D)`` holds gate and up; quantize ``silu(gate) * up``, rounded as the eager code rounds it.
        codes: write whole codes, one a byte.
        packed: write two codes a byte, of E2M1.
        operand: write exact bfloat16 operands; into this contiguous tensor ``(..., D)`` if it is one.
        values: write dequantized values in this dtype.
        bits: write this many bit planes, 0 for none.
        decode: write the global decode scale of each row. Only under scope ``token``.
        place: where planes, scales, global scales and tickets are recorded, and bit planes nowhere else.

    Raises:
        FormatError: ``packed``, and elements of more than four bits.
    """
    width, lead = x.shape[-1], x.shape[:-1]
    x, stride, groups, group_stride = _rows(x)
    rows = x.numel() // width
    if gated:
        width //= 2
    out = allocate(x, lead, width, rules, codes, packed, operand, values, 0 if place else bits)
    given = global_scale is not None and rules.scope in ("token", "tensor")
    if given or rules.scope != "token":
        out.global_scale = global_scale
    if decode and rules.scope == "token":
        out.decode = torch.empty((*lead, 1), dtype=torch.float32, device=x.device)
    per_global = rows // global_scale.numel() if given and global_scale is not None else 1
    if not bits and not gated and joins_rows(x, rules):
        width, rows = x.numel(), 1
    tile = tile_of(width, rules, given)
    grid = (rows, cdiv(width // rules.block, tile))
    none = out.scales  # never touched: the kernel was compiled without what is None
    _quantize[grid](
        x, *(given_or(t, none) for t in (global_scale, out.codes, out.packed)), out.scales,
        *(given_or(t, none) for t in (out.global_scale, out.operand, out.values, out.planes, out.decode)),
        *((none, none, none) if place is None else (place.rows, place.slots, place.tickets)),
        width, stride, groups, group_stride, per_global,
        *((0, 0, 0) if place is None else (place.rows.stride(0), place.start, place.size)),
        TILE=tile, GATED=gated, GIVEN=given, DECODE=out.decode is not None, CODES=codes, PACKED=packed,
        OPERAND=out.operand is not None, VALUES=values is not None, BITS=bits,
        VECTORS=0 if place is None else place.vectors,
        **rules.constants(), num_warps=warps_of(tile * rules.block, grid[0] * grid[1], costly=gated),
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def joins_rows(x: Tensor, rules: Rules) -> bool:
    """Whether all rows may be taken as one, which gives every program a full tile however narrow a row is.

    That needs that no scale spans a row, and that the pieces of the long row fit into the second axis of a grid.
    """
    return rules.scope in ("constant", "none") and x.is_contiguous() and x.numel() <= GRID_LIMIT * _PIECE


def tile_of(width: int, rules: Rules, given: bool = False) -> int:
    """Blocks of a program's tile, a power of two: the whole row where it shares a scale that is made here."""
    whole = next_power_of_2(width // rules.block)
    return whole if rules.scope == "token" and not given else min(whole, _PIECE // rules.block)


def warps_of(values: int, programs: int = _WARPS, *, costly: bool = False) -> int:
    """Warps for a tile; one at least, sixteen at most.

    32 values a thread, so that scales weigh little, if there are ``programs`` enough. A gate or a second term is
    ``costly``: it needs more registers for each, and half as many values then leave room for warps that hide each
    other's loads. With fewer programs, as in a decode step, a thread's length decides: as many warps as the GPU has
    room for, down to 8 values a thread, a load.
    """
    each = 16 if costly else 32
    size, room = next_power_of_2(values), 1 << (max(_WARPS // programs, 1).bit_length() - 1)
    return max(1, min(16, max(size // (32 * each), min(size // 256, room))))


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """``x`` with its row stride, rows of a group and stride of groups; copied if it is laid out in any other way."""
    width = x.shape[-1]
    if x.ndim == 3 and x.stride(2) == 1:
        return x, x.stride(1), x.shape[1], x.stride(0)
    if x.ndim == 2 and x.stride(1) == 1:
        return x, x.stride(0), max(x.shape[0], 1), 0
    return x.contiguous(), width, max(x.numel() // width, 1), 0
