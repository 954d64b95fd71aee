"""Weighted sums of words modulo 2^64: a fingerprint (:mod:`tracefp4.models.fingerprint`) as one pass.

A program takes a piece of one tile of words, multiplies each by its key, and adds the product of their sum and the key
of the tile to the number of the slab. Integers wrap, so the order in which programs add does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 4096
"""Words of a program; divides every tile."""


@triton.jit
def _weigh(
    words_ptr, lane_ptr, tile_ptr, sums_ptr, count, TILE: tl.constexpr, TILES: tl.constexpr, PIECE: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * PIECE
    at = tl.arange(0, PIECE)
    word = tl.load(words_ptr + first + at, mask=first + at < count, other=0).to(tl.int64)
    key = tl.load(lane_ptr + first % TILE + at)
    tile = first // TILE
    total = tl.sum(word * key, axis=0) * tl.load(tile_ptr + tile % TILES)
    tl.atomic_add(sums_ptr + tile // TILES, total, sem="relaxed")


def weigh(words: Tensor, lane: Tensor, tile: Tensor) -> Tensor:
    """Sum of ``lane key x tile key x word`` of each slab.

    Args:
        words: int32 ``(n,)``, contiguous.
        lane: int64 ``(L,)``, keys of the words of a tile; ``L`` a multiple of 4096.
        tile: int64 ``(T,)``, keys of the tiles of a slab.

    Returns:
        int64 ``(max(1, ceil(n / (L T))),)``, modulo 2^64.
    """
    count, slab = words.numel(), lane.numel() * tile.numel()
    sums = torch.zeros(max(1, triton.cdiv(count, slab)), dtype=torch.int64, device=words.device)
    if count:
        _weigh[(triton.cdiv(count, _PIECE),)](
            words, lane, tile, sums, count, TILE=lane.numel(), TILES=tile.numel(), PIECE=_PIECE, num_warps=8
        )  # fmt: skip
    return sums
