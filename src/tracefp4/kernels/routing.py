"""Which expert computes which pairs, found on the device.

A pair is a token and one of its expert slots, ``token * K + slot``. A matrix product wants the pairs of one expert side
by side, in tiles of a fixed number of rows. Nothing here waits for the host: the number of tiles is not known there,
only its bound, and a program whose tile is empty ends at once. So a decode step can be captured in a CUDA graph.

Sorting is counting: the place of a pair is the number of pairs that come before it, by expert and then by pair. One
warp counts for one expert, and no warp waits for another one. That works because the list of tiles has holes. An expert
whose pairs stand at the places ``first..end-1`` owns entries of the list that follow from these two numbers alone, and
writes each of them, with a tile or an empty one::

    few pairs, one entry each     entries first..end-1, a tile of the expert in each of the first
    more                          entry e of expert e: its last tile, which may be partly filled;
                                  entries E + ceil(first / rows) .. E + ceil(end / rows) - 1: its full tiles

Between two multiples of ``rows`` lies at most one start of a full tile, so the second range is never too short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.sizes import cdiv

COUNTING_LIMIT = 8192
"""Most pairs that are sorted by counting; every program reads all of them, so more are sorted by PyTorch."""


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
def _list_tiles(tiles_ptr, expert, first, size, experts, ROWS: tl.constexpr, BY_PLACE: tl.constexpr):
    """Write the entries that one expert owns in the list of tiles."""
    entry = tl.arange(0, 32)
    end = first + size
    if BY_PLACE:
        base, owned, limit = first, size, end
    else:
        before = (first + ROWS - 1) // ROWS
        base, owned = experts + before, (end + ROWS - 1) // ROWS - before
        limit = first + tl.maximum(size - 1, 0) // ROWS * ROWS  # where the last tile begins
        tl.store(tiles_ptr + expert * 3, expert)
        tl.store(tiles_ptr + expert * 3 + 1, limit)
        tl.store(tiles_ptr + expert * 3 + 2, end)
    for done in range(0, owned, 32):
        index = done + entry
        start = tl.minimum(first + index * ROWS, limit)
        at, mine = tiles_ptr + (base + index) * 3, index < owned
        tl.store(at, tl.zeros_like(index) + expert, mask=mine)
        tl.store(at + 1, start, mask=mine)
        tl.store(at + 2, tl.minimum(start + ROWS, limit), mask=mine)


@triton.jit
def _count(
    experts_ptr, order_ptr, tiles_ptr, pairs, experts,
    ROWS: tl.constexpr, BY_PLACE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program an expert: where its pairs begin, their order, its tiles."""
    expert = tl.program_id(0)
    lane = tl.arange(0, STEP)
    below, own = tl.zeros((STEP,), tl.int32), tl.zeros((STEP,), tl.int32)
    for done in range(0, pairs, STEP):
        chosen = tl.load(experts_ptr + done + lane, mask=done + lane < pairs, other=2**30).to(tl.int32)
        below += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    first, size = tl.sum(below, axis=0), tl.sum(own, axis=0)
    _list_tiles(tiles_ptr, expert, first, size, experts, ROWS, BY_PLACE)
    if size > 0:
        place = first
        for done in range(0, pairs, STEP):
            chosen = tl.load(experts_ptr + done + lane, mask=done + lane < pairs, other=2**30).to(tl.int32)
            match = (chosen == expert).to(tl.int32)
            at = place + tl.cumsum(match, axis=0) - 1
            tl.store(order_ptr + at, done + lane, mask=match == 1)
            place += tl.sum(match, axis=0)


@triton.jit
def _cut(starts_ptr, tiles_ptr, experts, count, ROWS: tl.constexpr, BY_PLACE: tl.constexpr):
    """One program an expert and layer: its tiles, of pairs that are sorted already."""
    expert = tl.program_id(0)
    starts_ptr += tl.program_id(1) * (experts + 1)
    tiles_ptr += tl.program_id(1) * count * 3
    first = tl.load(starts_ptr + expert).to(tl.int32)
    size = tl.load(starts_ptr + expert + 1).to(tl.int32) - first
    _list_tiles(tiles_ptr, expert, first, size, experts, ROWS, BY_PLACE)


def max_tiles(pairs: int, experts: int, rows: int) -> int:
    """Entries of the list of tiles of ``pairs`` pairs."""
    return min(pairs, experts + cdiv(pairs, rows))


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
    constants = {"ROWS": rows, "BY_PLACE": count == pairs}
    if pairs > COUNTING_LIMIT:
        order, starts = _sort(flat.to(torch.int32), num_experts)
        _cut[(num_experts, 1)](starts, tiles, num_experts, count, **constants, num_warps=1)
        return Route(order.to(torch.int32), tiles, rows, experts.shape[-1])
    order = torch.empty(pairs, dtype=torch.int32, device=flat.device)
    step = next((step for step in (32, 128, 512) if pairs <= step), 2048)
    _count[(num_experts,)](
        flat, order, tiles, pairs, num_experts, **constants, STEP=step, num_warps=4 if step == 2048 else 1
    )
    return Route(order, tiles, rows, experts.shape[-1])


def route_layers(experts: Tensor, num_experts: int, rows: int) -> list[tuple[Route, Tensor]]:
    """:func:`route` of the same tokens in several layers, all in one sort.

    Args:
        experts: integer ``(layers, T, K)`` expert ids in ``0..num_experts-1``; not checked.
        num_experts: experts of each layer.
        rows: most pairs of a tile.

    Returns:
        For each layer its route, and where each expert's pairs begin in its order, int64 ``(E + 1,)``.
    """
    layers, pairs, device = experts.shape[0], experts[0].numel(), experts.device
    count = max_tiles(pairs, num_experts, rows)
    first = torch.arange(layers, device=device, dtype=torch.int32).unsqueeze(1)
    # Experts of all layers are told apart by number: those of layer l are l E .. l E + E - 1.
    order, starts = _sort((experts.reshape(layers, pairs) + first * num_experts).flatten(), layers * num_experts)
    order = (order.view(layers, pairs) - first * pairs).to(torch.int32)
    starts = starts.unfold(0, num_experts + 1, num_experts) - first * pairs
    tiles = torch.empty(layers, count, 3, dtype=torch.int32, device=device)
    if pairs:
        _cut[(num_experts, layers)](
            starts, tiles, num_experts, count, ROWS=rows, BY_PLACE=count == pairs, num_warps=1
        )  # fmt: skip
    routes = (
        Route(mine, cut, rows, experts.shape[-1]) for mine, cut in zip(order.unbind(), tiles.unbind(), strict=True)
    )
    return list(zip(routes, starts.unbind(), strict=True))


def _sort(flat: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs by expert, then by pair, and where each expert's begin; int64."""
    ordered, order = torch.sort(flat, stable=True)
    ids = torch.arange(num_experts + 1, device=flat.device, dtype=flat.dtype)
    return order, torch.searchsorted(ordered, ids)
