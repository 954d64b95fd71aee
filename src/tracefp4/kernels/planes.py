"""Bit planes to bytes and back: the codec of :mod:`tracefp4.guidance.codec` as one pass.

A program takes a piece of one vector. Packing reads eight values and writes one byte of each plane; unpacking reads 32
bits of each plane and spreads them, four at a time, over 32 values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.sizes import cdiv, next_power_of_2

_PIECE = 4096
"""Values of a program."""


@triton.jit
def _pack(low_ptr, planes_ptr, width, BITS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = byte < width // 8
    lane = tl.arange(0, 8)
    at = low_ptr + row * width + byte[:, None] * 8 + lane[None, :]
    value = tl.load(at, mask=tl.broadcast_to(mask[:, None], (TILE, 8)), other=0).to(tl.int32)
    for bit in tl.static_range(BITS):
        plane = tl.sum(((value >> bit) & 1) << lane[None, :], axis=1)
        tl.store(planes_ptr + (row * BITS + bit) * (width // 8) + byte, plane.to(tl.uint8), mask=mask)


@triton.jit
def _unpack(planes_ptr, low_ptr, width, BITS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr):
    """Four values at a time: ``UNIT`` bits of a plane are a number at ``planes_ptr``, four values one at ``low_ptr``.

    A multiplication by 2^0 + 2^7 + 2^14 + 2^21 puts bit ``k`` of a nibble where byte ``k`` begins, among others.
    """
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = unit < width // UNIT
    lane = tl.arange(0, UNIT // 4)
    value = tl.zeros((TILE, UNIT // 4), tl.uint32)
    for bit in tl.static_range(BITS):
        plane = tl.load(planes_ptr + (row * BITS + bit) * (width // UNIT) + unit, mask=mask, other=0).to(tl.uint32)
        nibble = (plane[:, None] >> (lane * 4)[None, :]) & 15
        value |= (nibble * (0x00204081 << bit)) & (0x01010101 << bit)
    at = low_ptr + row * (width // 4) + unit[:, None] * (UNIT // 4) + lane[None, :]
    tl.store(at, value.to(tl.int32, bitcast=True), mask=tl.broadcast_to(mask[:, None], (TILE, UNIT // 4)))


def pack(low: Tensor, bits: int) -> Tensor:
    """Planes uint8 ``(..., bits * D / 8)`` of uint8 ``low (..., D)``, ``D`` a multiple of 8."""
    width = low.shape[-1]
    planes = torch.empty((*low.shape[:-1], bits * width // 8), dtype=torch.uint8, device=low.device)
    if low.numel():
        rows, width = _joined(low.numel(), width, bits)
        tile = min(next_power_of_2(width // 8), _PIECE // 8)
        _pack[(rows, cdiv(width // 8, tile))](low.contiguous(), planes, width, BITS=bits, TILE=tile)
    return planes


def unpack(planes: Tensor, bits: int, width: int) -> Tensor:
    """Values uint8 ``(..., width)`` of ``planes`` uint8 ``(..., bits * width / 8)``."""
    low = torch.empty((*planes.shape[:-1], width), dtype=torch.uint8, device=planes.device)
    if low.numel():
        rows, width = _joined(low.numel(), width, bits)
        planes, unit = planes.contiguous(), 8
        if width % 32 == 0 and planes.data_ptr() % 4 == 0:
            planes, unit = planes.flatten().view(torch.int32), 32
        tile = min(next_power_of_2(width // unit), _PIECE // unit)
        target = low.flatten().view(torch.int32)
        _unpack[(rows, cdiv(width // unit, tile))](planes, target, width, BITS=bits, UNIT=unit, TILE=tile)
    return low


def _joined(values: int, width: int, bits: int) -> tuple[int, int]:
    """Rows and their width; the plane of a vector is followed by that of the next, so under one bit rows are one."""
    return (1, values) if bits == 1 and values < 2**31 else (values // width, width)
