"""Bit planes to bytes and back: the codec of :mod:`tracefp4.guidance.codec` as one pass.

A program takes a piece of one vector. Packing reads eight values and writes one byte of each plane; unpacking reads the
byte of each plane and spreads it over eight values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def _unpack(planes_ptr, low_ptr, width, BITS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = byte < width // 8
    lane = tl.arange(0, 8)
    value = tl.zeros((TILE, 8), tl.int32)
    for bit in tl.static_range(BITS):
        plane = tl.load(planes_ptr + (row * BITS + bit) * (width // 8) + byte, mask=mask, other=0).to(tl.int32)
        value |= ((plane[:, None] >> lane[None, :]) & 1) << bit
    at = low_ptr + row * width + byte[:, None] * 8 + lane[None, :]
    tl.store(at, value.to(tl.uint8), mask=tl.broadcast_to(mask[:, None], (TILE, 8)))


def pack(low: Tensor, bits: int) -> Tensor:
    """Planes uint8 ``(..., bits * D / 8)`` of uint8 ``low (..., D)``, ``D`` a multiple of 8."""
    width = low.shape[-1]
    planes = torch.empty((*low.shape[:-1], bits * width // 8), dtype=torch.uint8, device=low.device)
    _launch(_pack, low.contiguous(), planes, low.numel(), width, bits)
    return planes


def unpack(planes: Tensor, bits: int, width: int) -> Tensor:
    """Values uint8 ``(..., width)`` of ``planes`` uint8 ``(..., bits * width / 8)``."""
    low = torch.empty((*planes.shape[:-1], width), dtype=torch.uint8, device=planes.device)
    _launch(_unpack, planes.contiguous(), low, low.numel(), width, bits)
    return low


def _launch(kernel: triton.JITFunction, source: Tensor, target: Tensor, values: int, width: int, bits: int) -> None:
    if not values:
        return
    rows = values // width
    if bits == 1 and values < 2**31:
        rows, width = 1, values  # the plane of a vector is followed by that of the next: rows may be joined
    tile = min(triton.next_power_of_2(width // 8), _PIECE // 8)
    kernel[(rows, triton.cdiv(width // 8, tile))](source, target, width, BITS=bits, TILE=tile)
