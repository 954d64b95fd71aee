"""Which expert computes which pairs, found on the device.

A pair is a token and one of its expert slots, ``token * K + slot``. A matrix product wants the pairs of one expert side
by side, in tiles of a fixed number of rows. Nothing here waits for the host: the number of tiles is not known there,
only its bound, and a program whose tile is empty ends at once. So a decode step can be captured in a CUDA graph.

Sorting is counting: the place of a pair is the number of pairs that come before it, by expert and then by pair. One
warp counts for one expert, and no warp waits for another one. It counts the experts that were hit as well, those in
front of its own and all of them, ``hits``; from these numbers and the places of its pairs, ``first..end-1``, follow the
entries of the list that its expert owns. It writes each of them, with a tile or an empty one::

    entries 0 .. hits-1             one of each expert that was hit: its last tile, which may be partly filled
    hits + ceil(first / rows) ..    one expert's full tiles; between two multiples of ``rows`` lies at most one start
    hits + ceil(end / rows) - 1     of a full tile, so there are always enough entries
    the rest                        empty, one of each expert that was not hit

So tiles stand side by side, and what a product launches for empty entries comes last. That matters: a GPU that has
room for all programs of a launch deals them out in their order, and if every second one were empty some
multiprocessors would get half as many real ones again as others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.sizes import cdiv, next_power_of_2

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

    @property
    def most(self) -> int:
        """Tiles that there can be, as far as the host knows."""
        return min(self.order.numel(), self.tiles.shape[0])


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _list_tiles(tiles_ptr, expert, first, size, rank, hits, pairs, count, ROWS: tl.constexpr, FULL: tl.constexpr):
    """Write the entries that one expert owns in the list of tiles; ``rank`` of those hit are in front of it."""
    end = first + size
    limit = first + tl.maximum(size - 1, 0) // ROWS * ROWS  # where the last tile begins
    rest = hits + expert - rank
    if FULL:
        rest += (pairs + ROWS - 1) // ROWS
    own = tl.where(size > 0, rank, rest)
    if own < count:
        tl.store(tiles_ptr + own * 3, expert)
        tl.store(tiles_ptr + own * 3 + 1, limit)
        tl.store(tiles_ptr + own * 3 + 2, end)
    if FULL:
        entry = tl.arange(0, 32)
        before = (first + ROWS - 1) // ROWS
        owned = (end + ROWS - 1) // ROWS - before
        for done in range(0, owned, 32):
            index = done + entry
            start = tl.minimum(first + index * ROWS, limit)
            at, mine = tiles_ptr + (hits + before + index) * 3, index < owned
            tl.store(at, tl.zeros_like(index) + expert, mask=mine)
            tl.store(at + 1, start, mask=mine)
            tl.store(at + 2, tl.minimum(start + ROWS, limit), mask=mine)


@triton.jit
def _count(
    experts_ptr, order_ptr, tiles_ptr, pairs, count,
    ROWS: tl.constexpr, FULL: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program an expert: where its pairs begin, their order, its tiles. ``WORDS`` of 32 bits hold all experts."""
    expert = tl.program_id(0)
    lane, bit = tl.arange(0, STEP), tl.arange(0, 32)
    below, own = tl.zeros((STEP,), tl.int32), tl.zeros((STEP,), tl.int32)
    seen = (tl.full((), 0, tl.int32),) * WORDS
    for done in range(0, pairs, STEP):
        chosen = tl.load(experts_ptr + done + lane, mask=done + lane < pairs, other=2**30).to(tl.int32)
        below += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
        found = ()
        for word in tl.static_range(WORDS):
            mine = tl.where(chosen // 32 == word, 1 << (chosen % 32), 0)
            found = found + (seen[word] | tl.reduce(mine, 0, _either),)
        seen = found
    hit, before = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.int32)
    for word in tl.static_range(WORDS):
        there = (seen[word] >> bit) & 1
        hit += there
        before += tl.where(word * 32 + bit < expert, there, 0)
    first, size = tl.sum(below, axis=0), tl.sum(own, axis=0)
    hits, rank = tl.sum(hit, axis=0), tl.sum(before, axis=0)
    _list_tiles(tiles_ptr, expert, first, size, rank, hits, pairs, count, ROWS, FULL)
    if size > 0:
        place = first
        for done in range(0, pairs, STEP):
            chosen = tl.load(experts_ptr + done + lane, mask=done + lane < pairs, other=2**30).to(tl.int32)
            match = (chosen == expert).to(tl.int32)
            at = place + tl.cumsum(match, axis=0) - 1
            tl.store(order_ptr + at, done + lane, mask=match == 1)
            place += tl.sum(match, axis=0)


@triton.jit
def _cut(
    starts_ptr, tiles_ptr, experts, pairs, count, ROWS: tl.constexpr, FULL: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """One program an expert and layer: its tiles, of pairs that are sorted already."""
    expert = tl.program_id(0)
    starts_ptr += tl.program_id(1) * (experts + 1)
    tiles_ptr += tl.program_id(1) * count * 3
    other = tl.arange(0, SIZE)
    begin = tl.load(starts_ptr + other, mask=other < experts, other=0)
    hit = (tl.load(starts_ptr + other + 1, mask=other < experts, other=0) > begin).to(tl.int32)
    hits, rank = tl.sum(hit, axis=0), tl.sum(tl.where(other < expert, hit, 0), axis=0)
    first = tl.load(starts_ptr + expert).to(tl.int32)
    size = tl.load(starts_ptr + expert + 1).to(tl.int32) - first
    _list_tiles(tiles_ptr, expert, first, size, rank, hits, pairs, count, ROWS, FULL)


def max_tiles(pairs: int, experts: int, rows: int) -> int:
    """Entries of the list of tiles of ``pairs`` pairs."""
    return min(pairs, experts) + (cdiv(pairs, rows) if pairs > rows else 0)


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
    constants = {"ROWS": rows, "FULL": pairs > rows}
    if pairs > COUNTING_LIMIT:
        order, starts = _sort(flat.to(torch.int32), num_experts)
        _cut[(num_experts, 1)](
            starts, tiles, num_experts, pairs, count, **constants, SIZE=next_power_of_2(num_experts), num_warps=1
        )  # fmt: skip
        return Route(order.to(torch.int32), tiles, rows, experts.shape[-1])
    order = torch.empty(pairs, dtype=torch.int32, device=flat.device)
    step = next((step for step in (32, 128, 512) if pairs <= step), 2048)
    _count[(num_experts,)](
        flat, order, tiles, pairs, count, **constants, WORDS=cdiv(num_experts, 32), STEP=step,
        num_warps=4 if step == 2048 else 1,
    )  # fmt: skip
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
            starts, tiles, num_experts, pairs, count, ROWS=rows, FULL=pairs > rows,
            SIZE=next_power_of_2(num_experts), num_warps=1,
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
