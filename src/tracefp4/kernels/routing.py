"""Which expert computes which pairs, found on the device.

A pair is a token and one of its expert slots, ``token * K + slot``. A matrix product wants the pairs of one expert side
by side, in tiles of a fixed number of rows. Nothing here waits for the host: the number of tiles is not known there,
only its bound, and a program beyond the last tile ends at once. So a decode step can be captured in a CUDA graph.

Sorting is counting: the place of a pair is the number of pairs that come before it, by expert and then by pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

COUNTING_LIMIT = 8192
"""Most pairs that are sorted by counting; more are sorted by PyTorch, whose work does not grow with their square."""


@dataclass(frozen=True, slots=True)
class Route:
    """Pairs in tiles, on the device."""

    order: Tensor
    """int32 ``(P,)``: pairs sorted by expert, then by pair."""
    tiles: Tensor
    """int32 ``(tiles, 3)``: expert, first place in ``order``, one past the last; unused tiles are empty."""
    rows: int
    """Most pairs of a tile."""
    top_k: int


@triton.jit
def _place(experts_ptr, order_ptr, pairs, SIZE: tl.constexpr, STEP: tl.constexpr):
    pair = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    here = tl.load(experts_ptr + pair, mask=pair < pairs, other=0).to(tl.int32)
    place = tl.zeros((SIZE,), tl.int32)
    for first in range(0, pairs, STEP):
        other = first + tl.arange(0, STEP)
        there = tl.load(experts_ptr + other, mask=other < pairs, other=2**30).to(tl.int32)
        before = (there[None, :] < here[:, None]) | (
            (there[None, :] == here[:, None]) & (other[None, :] < pair[:, None])
        )
        place += tl.sum(before.to(tl.int32), axis=1)
    tl.store(order_ptr + place, pair, mask=pair < pairs)


@triton.jit
def _tile(experts_ptr, tiles_ptr, pairs, count, ROWS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr):
    """One program: pairs of each expert, its first tile, and the list of tiles."""
    expert = tl.arange(0, EXPERTS)
    size = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, pairs, STEP):
        other = first + tl.arange(0, STEP)
        there = tl.load(experts_ptr + other, mask=other < pairs, other=2**30).to(tl.int32)
        size += tl.sum((there[None, :] == expert[:, None]).to(tl.int32), axis=1)
    needed = (size + ROWS - 1) // ROWS
    first_place = tl.cumsum(size, axis=0) - size
    first_tile = tl.cumsum(needed, axis=0) - needed
    used = tl.sum(needed, axis=0)
    most = tl.max(needed, axis=0)
    for i in range(0, most):
        at = tiles_ptr + (first_tile + i) * 3
        live = i < needed
        tl.store(at, expert, mask=live)
        tl.store(at + 1, first_place + i * ROWS, mask=live)
        tl.store(at + 2, tl.minimum(first_place + (i + 1) * ROWS, first_place + size), mask=live)
    for first in range(used, count, EXPERTS):
        at = first + expert
        for field in tl.static_range(3):
            tl.store(tiles_ptr + at * 3 + field, tl.zeros((EXPERTS,), tl.int32), mask=at < count)


def max_tiles(pairs: int, experts: int, rows: int) -> int:
    """Bound on the tiles of ``pairs`` pairs."""
    return min(pairs, experts + pairs // rows)


def route(experts: Tensor, num_experts: int, rows: int) -> Route:
    """Sort the pairs of a batch into tiles, without waiting for the device.

    Args:
        experts: integer ``(T, K)`` expert ids in ``0..num_experts-1``; not checked.
        num_experts: experts of the layer.
        rows: most pairs of a tile.
    """
    flat = experts.reshape(-1).contiguous()
    pairs = flat.numel()
    count = max_tiles(pairs, num_experts, rows)
    tiles = torch.empty(count, 3, dtype=torch.int32, device=flat.device)
    if pairs <= COUNTING_LIMIT:
        order = torch.empty(pairs, dtype=torch.int32, device=flat.device)
        size = 16 if pairs <= 512 else 64
        _place[(triton.cdiv(pairs, size),)](flat, order, pairs, SIZE=size, STEP=128)
    else:
        order = torch.sort(flat, stable=True)[1].to(torch.int32)
    _tile[(1,)](
        flat, tiles, pairs, count, ROWS=rows, EXPERTS=triton.next_power_of_2(num_experts), STEP=32, num_warps=8
    )  # fmt: skip
    return Route(order, tiles, rows, experts.shape[-1])
