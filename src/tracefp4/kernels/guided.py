"""Guided rounding in one pass, from packed guidance to operands.

A program takes a vector of the trainer, or a piece of one that has no scale of its own. It reads the vector's
recorded bits from their planes, takes the rollout's block scales (whole, or restored from their low bits with the
help of its own), and writes codes, operands or values. A vector without guidance is rounded to nearest with scales of
its own by the same program, so a mixed batch needs no second pass and no merge. Without recorded bits a vector is
rounded to nearest at the rollout's scales, which is how a trainer finds bits that it has checks of. Nothing is
unpacked to memory and nothing in fp32 is kept: the gradient is straight-through.

Vectors of K and V have some 64 values, which is no work for a program. Where no scale spans a vector and all of them
are in order, contiguous and guided, they are taken as one long row, and only what was recorded is looked up vector by
vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import guided, nearest
from tracefp4.kernels.outputs import Fused, allocate, given_or
from tracefp4.kernels.quantize import ROW_LIMIT, joins_rows, load_blocks, tile_of, warps_of, write
from tracefp4.kernels.rules import Rules
from tracefp4.kernels.scales import (
    block_amax,
    block_scale,
    block_unit,
    global_forms,
    global_from_amax,
    has_nan,
    normalized,
    row_top,
    signs_under,
)
from tracefp4.kernels.sizes import cdiv


@triton.jit
def _restored(own, low, SCALE_BITS: tl.constexpr, E8M0: tl.constexpr):
    """The byte nearest to ``own`` with the recorded low bits; ties to the smaller (int32)."""
    period: tl.constexpr = 1 << SCALE_BITS
    largest: tl.constexpr = 254 if E8M0 else 126
    center = tl.minimum(own, largest)
    step = ((low - center + period // 2) & (period - 1)) - period // 2
    byte = center + step
    return tl.where(byte < 0, byte + period, tl.where(byte > largest, byte - period, byte))


@triton.jit
def _recorded_scales(ptr, row, block, inside, blocks, SCALE_BITS: tl.constexpr):
    """Recorded scale bytes, whole or their low bits, of blocks of a vector of ``blocks`` (int32)."""
    if SCALE_BITS == 8:
        return tl.load(ptr + row * blocks + block, mask=inside, other=0).to(tl.int32)
    else:
        plane = (blocks + 7) // 8
        value = tl.zeros_like(block)
        for bit in tl.static_range(SCALE_BITS):
            byte = tl.load(ptr + (row * SCALE_BITS + bit) * plane + block // 8, mask=inside, other=0).to(tl.int32)
            value |= ((byte >> (block % 8)) & 1) << bit
        return value


@triton.jit
def _recorded_bits(ptr, row, block, inside, blocks, TILE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Recorded low bits ``(TILE, BLOCK)`` (int32) of codes; a block's bits of a plane are one word."""
    kind: tl.constexpr = tl.int16 if BLOCK == 16 else tl.int32
    words = ptr.to(tl.pointer_type(kind))
    low = tl.zeros((TILE, BLOCK), tl.int32)
    for bit in tl.static_range(BITS):
        data = tl.load(words + (row * BITS + bit) * blocks + block, mask=inside, other=0).to(tl.int32)
        low |= ((data[:, None] >> tl.arange(0, BLOCK)[None, :]) & 1) << bit
    return low


@triton.jit
def _quantize_guided(
    x_ptr, planes_ptr, recorded_ptr, global_ptr, rows_ptr, valid_ptr,
    codes_ptr, packed_ptr, scales_ptr, new_global_ptr, decode_ptr, operand_ptr, values_ptr, kept_ptr,
    width, x_stride, vectors,
    TILE: tl.constexpr, GATED: tl.constexpr, JOINED: tl.constexpr, ORDERED: tl.constexpr, PARTIAL: tl.constexpr,
    SCALE_BITS: tl.constexpr, BITS: tl.constexpr, KEPT: tl.constexpr,
    CODES: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, EIGHT: tl.constexpr, E8M0: tl.constexpr, TIES: tl.constexpr, NEGATIVE_ZERO: tl.constexpr,
    SCALE_RULE: tl.constexpr, SCALE_FLOOR: tl.constexpr, FLOOR_BYTE: tl.constexpr, ZERO_BYTE: tl.constexpr,
    QUOTIENT: tl.constexpr, SCOPE: tl.constexpr, GLOBAL_RULE: tl.constexpr, GLOBAL_FORM: tl.constexpr,
    CONSTANT: tl.constexpr,
):  # fmt: skip
    """``JOINED``: blocks of a vector, if vectors are taken as one long row; else 0."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = block * BLOCK < width
    x = load_blocks(x_ptr + row * x_stride, block, width, TILE, BLOCK, GATED)
    source = row
    if ORDERED:
        source = tl.load(rows_ptr + row)
    follows = True
    if PARTIAL:
        follows = tl.load(valid_ptr + source // vectors) != 0
    place, blocks = block, width // BLOCK
    if JOINED:
        source, place, blocks = block // JOINED, block % JOINED, JOINED

    amax = block_amax(x)
    g = 1.0
    if SCOPE == "token":
        g = tl.load(global_ptr + source)
        if PARTIAL:
            g = tl.where(follows, g, global_from_amax(row_top(amax), GLOBAL_RULE, GLOBAL_FORM))
        tl.store(new_global_ptr + row, g)
    encode, decode = global_forms(g, SCOPE, GLOBAL_FORM, CONSTANT)
    if SCOPE == "token":
        tl.store(decode_ptr + row, decode)
    scale = _recorded_scales(recorded_ptr, source, place, inside, blocks, SCALE_BITS)
    if PARTIAL or SCALE_BITS != 8:
        own = block_scale(amax, encode, decode, EIGHT, E8M0, SCALE_RULE, SCALE_FLOOR, FLOOR_BYTE, ZERO_BYTE)
        if SCALE_BITS != 8:
            scale = _restored(own, scale, SCALE_BITS, E8M0)
        if PARTIAL:
            scale = tl.where(follows, scale, own)

    unit = block_unit(scale, encode, decode, E8M0, QUOTIENT)
    z = normalized(x, unit, E8M0, QUOTIENT)
    signs = signs_under(scale, E8M0)[:, None]
    if BITS == 0:
        code, level = nearest(z, signs, EIGHT, TIES, NEGATIVE_ZERO)
    elif follows:  # decided by the compiler, or under PARTIAL by a number that the program reads
        low = _recorded_bits(planes_ptr, source, place, inside, blocks, TILE, BLOCK, BITS)
        code, level = guided(z, low, signs, EIGHT, BITS)
    else:
        code, level = nearest(z, signs, EIGHT, TIES, NEGATIVE_ZERO)
    broken = has_nan(z, amax, unit, PARTIAL or SCALE_BITS != 8, E8M0, QUOTIENT)
    if PARTIAL:
        broken = broken & follows
    scale = tl.where(broken, 255 if E8M0 else 127, scale)
    tl.store(scales_ptr + row * (width // BLOCK) + block, scale.to(tl.uint8), mask=inside)
    write(
        code, level, scale, decode, row, block, width,
        codes_ptr, packed_ptr, operand_ptr, values_ptr, kept_ptr,
        TILE, CODES, PACKED, OPERAND, VALUES, KEPT, BLOCK, E8M0,
    )  # fmt: skip


def fits(x: Tensor, rules: Rules, gated: bool = False) -> bool:
    """Whether :func:`quantize_guided` takes ``x (R, D)``, or ``(R, 2 D)`` if ``gated``."""
    return x.ndim == 2 and x.numel() > 0 and x.shape[1] <= (2 * ROW_LIMIT if gated else ROW_LIMIT)


def quantize_guided(
    x: Tensor,
    rules: Rules,
    planes: Tensor,
    recorded: Tensor,
    global_scale: Tensor | None,
    *,
    bits: int,
    scale_bits: int,
    rows: Tensor | None = None,
    valid: Tensor | None = None,
    vectors: int = 1,
    gated: bool = False,
    codes: bool = False,
    packed: bool = False,
    operand: bool = False,
    values: torch.dtype | None = None,
    kept: int = 0,
) -> Fused:
    """Round ``x (R, D)`` as the recorded outcomes of ``T`` token rows say, decoder ``bracket``.

    Args:
        x: bfloat16, float16 or float32.
        rules: arithmetic choices.
        planes: uint8 ``(T * vectors, bits * D / 8)``, contiguous.
        recorded: uint8 ``(T * vectors, n)``: whole scale bytes, or planes of their low bits; contiguous.
        global_scale: float32 with ``T * vectors`` entries under scope ``token``, else ``None``.
        bits: recorded bits of each code, 1 to 4; 0 rounds to nearest at the recorded scales.
        scale_bits: 8, 3 or 2.
        rows: int64 ``(R,)``: index of each vector of ``x`` among the recorded ones; ``None`` if they are in order.
        valid: bool ``(T,)``: token rows that have guidance; the others are rounded on their own. ``None``: all have.
        vectors: vectors of a token row.
        gated: ``x (R, 2 D)`` holds gate and up; round ``silu(gate) * up``, itself rounded as the eager code does.
        codes: write whole codes.
        packed: write them two a byte, if they are of E2M1.
        operand: write exact bfloat16 operands.
        values: write dequantized values in this dtype.
        kept: write planes of so many low bits of each code.

    Returns:
        ``scales`` and ``global_scale`` (with its decode form) as used, and what was asked for. A block with a NaN has
        the NaN scale byte.

    Raises:
        FormatError: ``packed``, and elements of more than four bits.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    count, width = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]

    out = allocate(x, x.shape[:1], width, rules, codes, packed, operand, values, kept)
    if rules.scope == "token":
        out.decode = torch.empty((count, 1), dtype=torch.float32, device=x.device)
    joined = 0
    if rows is None and valid is None and kept < 2 and not gated and joins_rows(x, rules):
        joined, count, width = width // rules.block, 1, x.numel()
    tile, none = tile_of(width, rules), out.scales
    grid = (count, cdiv(width // rules.block, tile))
    _quantize_guided[grid](
        x, planes, recorded, *(given_or(t, none) for t in (global_scale, rows, valid, out.codes, out.packed)),
        out.scales,
        *(given_or(t, none) for t in (out.global_scale, out.decode, out.operand, out.values, out.planes)),
        width, x.stride(0), vectors,
        TILE=tile, GATED=gated, JOINED=joined, ORDERED=rows is not None, PARTIAL=valid is not None,
        SCALE_BITS=scale_bits, BITS=bits, KEPT=kept,
        CODES=codes, PACKED=packed, OPERAND=operand, VALUES=values is not None,
        **rules.constants(), num_warps=warps_of(tile * rules.block, grid[0] * grid[1], costly=gated),
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
