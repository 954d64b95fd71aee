"""Layouts in which FP4 kernels keep codes and scales, and the way back to plain rows.

Blackwell's matrix units read block scales in *tiles* of 128 rows and 4 blocks. A tile is 512 bytes; in it the scale of
row ``r`` and block ``b`` stands at ``(r % 32) * 16 + (r // 32 % 4) * 4 + b``. Tiles follow one another along the blocks
first, then along the rows, and both axes are padded to whole tiles::

    offset(r, b) = (r // 128 * tiles + b // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + b % 4

:func:`tile_offsets` is that formula; everything else here reads with it. CuteDSL sees the same bytes as six axes, which
:func:`from_matrix_view` undoes. Rows of weights are moved as well, so that a kernel finds gate and up side by side and
its lanes find their rows: :class:`Rows` names what was done to them, and :meth:`Rows.undo` reverses it.

The scales of V in an NVFP4 KV cache that TRT-LLM's attention reads are moved within groups of four tokens of a page and
head (:func:`four_token_places`): the scales that four neighbouring tokens have at the same place lie together.

Read in the sources of SGLang 0.5.23, vLLM 0.32 and FlashInfer 0.7.2; the suite applies their own layout functions where
they can be imported, and undoes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import EngineError, SyncError

TILE_ROWS, TILE_BLOCKS = 128, 4
SHUFFLE = 32
"""Rows that TRT-LLM's kernels permute among themselves."""


def tile_offsets(rows: Tensor, blocks: int) -> Tensor:
    """Where scales stand in the tiled layout: int64 ``(R, blocks)``.

    Args:
        rows: ``(R,)`` integer row numbers.
        blocks: scales of a row, before padding.
    """
    tiles = -(-blocks // TILE_BLOCKS)
    r = rows.to(torch.int64).unsqueeze(1)
    b = torch.arange(blocks, device=rows.device)
    tile = torch.div(r, TILE_ROWS, rounding_mode="floor") * tiles + torch.div(b, TILE_BLOCKS, rounding_mode="floor")
    inside = (r % 32) * 16 + torch.div(r % TILE_ROWS, 32, rounding_mode="floor") * 4 + b % TILE_BLOCKS
    return tile * (TILE_ROWS * TILE_BLOCKS) + inside


def tiled_rows(tiled: Tensor, rows: Tensor, blocks: int) -> Tensor:
    """Some rows of scales ``(R, blocks)`` uint8 out of the tiled layout, whatever shape it is held in."""
    return tiled.contiguous().view(torch.uint8).reshape(-1)[tile_offsets(rows, blocks)]


def linear_scales(tiled: Tensor, rows: int, blocks: int) -> Tensor:
    """The first ``rows`` rows of scales ``(rows, blocks)`` uint8 out of the tiled layout."""
    return tiled_rows(tiled, torch.arange(rows, device=tiled.device), blocks)


def from_matrix_view(scales: Tensor) -> Tensor:
    """The tiled bytes uint8 ``(G, bytes)`` of ``G`` matrices that CuteDSL sees as ``(32, 4, m, 4, k, G)``."""
    return scales.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).reshape(scales.shape[5], -1)


def four_token_places(tokens: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Where TRT-LLM's attention wants the scales of V, within a page and head.

    Four tokens and ``blocks`` scales are four quarters of a token's scales; quarter ``q`` of all four lies in row
    ``q``, the four tokens side by side: token ``t`` and block ``b`` stand in row ``t // 4 * 4 + b // (blocks / 4)``,
    column ``b % (blocks / 4) * 4 + t % 4``.

    Args:
        tokens: ``(T,)`` integer places in the page.
        blocks: scales of a token and head, a multiple of 4.

    Returns:
        Rows and columns, int64 ``(T, blocks)``.

    Raises:
        EngineError: another number of blocks.
    """
    if blocks % 4:
        raise EngineError(f"{blocks} scales a head are no multiple of 4, which this layout of V needs")
    t, b, quarter = tokens.to(torch.int64).unsqueeze(1), torch.arange(blocks, device=tokens.device), blocks // 4
    return t - t % 4 + torch.div(b, quarter, rounding_mode="floor"), b % quarter * 4 + t % 4


@dataclass(frozen=True, slots=True)
class Rows:
    """What was done to the rows of stacked weights ``(E, rows, columns)``, in this order."""

    up_first: bool = False
    """The two halves of gate and up changed places."""
    chunk: int = 0
    """Chunks of so many rows were taken from the two halves in turn; 0: the halves follow one another."""
    shuffled: bool = False
    """In each block of 32, row ``r`` moved to ``r % 4 * 8 + r // 4``, where TRT-LLM's lanes find it."""

    def undo(self, stored: Tensor, rows: int) -> Tensor:
        """Gate before up, without padding: ``(E, rows, columns)``.

        Args:
            stored: ``(E, padded rows, columns)``; halves are padded each for itself.
            rows: that the checkpoint has.

        Raises:
            SyncError: the stored rows cannot have been arranged so.
        """
        halves = 2 if self.up_first or self.chunk else 1
        unit = max(halves * self.chunk, SHUFFLE if self.shuffled else 1, halves)
        if stored.shape[1] % unit or rows % halves or stored.shape[1] < rows:
            raise SyncError(
                f"{stored.shape[1]} stored rows are no arrangement of {rows} rows in units of {unit}; this is another "
                "release's layout"
            )
        x = stored
        if self.shuffled:
            x = x.unflatten(1, (-1, 4, SHUFFLE // 4)).transpose(2, 3).flatten(1, 3)
        if self.chunk:
            x = x.unflatten(1, (-1, 2, self.chunk)).transpose(1, 2).flatten(1, 3)
        if halves == 2:
            x = x.unflatten(1, (2, -1))
            x = (x.flip(1) if self.up_first else x)[:, :, : rows // 2].flatten(1, 2)
        return x[:, :rows].contiguous()


PLAIN = Rows()
"""As the checkpoint has them."""
