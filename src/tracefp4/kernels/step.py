"""What a decode step has to know of its rows before its first layer, in one launch.

A row is a token of one sequence. Its slot follows from its position and its block table, its length from its position;
its ticket is left in the slot's record. These are a handful of integers a row, for which PyTorch would launch a kernel
each. The token itself may still be on the device, in the result of the step before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.sizes import cdiv

_TILE = 128
"""Rows of a program."""


@triton.jit
def _place(
    pages_ptr, positions_ptr, tickets_ptr, record_ptr, slots_ptr, lengths_ptr, narrow_ptr, rows, pages_stride,
    PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = row < rows
    position = tl.load(positions_ptr + row, mask=mask, other=0)
    page = tl.load(pages_ptr + row * pages_stride + position // PAGE, mask=mask, other=0).to(tl.int64)
    ticket = tl.load(tickets_ptr + row, mask=mask, other=0).to(tl.int32)
    slot = page * PAGE + position % PAGE
    tl.store(slots_ptr + row, slot, mask=mask)
    tl.store(lengths_ptr + row, position + 1, mask=mask)
    tl.store(narrow_ptr + row, ticket, mask=mask)
    tl.store(record_ptr + slot, ticket, mask=mask)


@triton.jit
def _take(tokens_ptr, source_ptr, before_ptr, rows, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    source = tl.load(source_ptr + row, mask=row < rows, other=-1)
    there = source >= 0
    tl.store(tokens_ptr + row, tl.load(before_ptr + source, mask=there, other=0), mask=there)


def place(
    pages: Tensor, positions: Tensor, tickets: Tensor, record: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, lengths and tickets of the rows of a step; tickets are also left at the slots in ``record``.

    Args:
        pages: int64 ``(B, W)`` block tables.
        positions: int64 ``(B,)``, each below ``W * page_size``.
        tickets: int64 ``(B,)``, each an int32.
        record: int32 ``(slots,)``.
        page_size: slots of a page.

    Returns:
        Slots ``(B,)`` int64, lengths ``(B,)`` int64, which are positions plus one, and tickets ``(B,)`` int32.
    """
    rows = len(positions)
    slots, lengths = torch.empty(2, rows, dtype=torch.int64, device=pages.device)
    narrow = torch.empty(rows, dtype=torch.int32, device=pages.device)
    _place[(cdiv(rows, _TILE),)](
        pages, positions, tickets, record, slots, lengths, narrow, rows, pages.stride(0),
        PAGE=page_size, TILE=_TILE, num_warps=1,
    )  # fmt: skip
    return slots, lengths, narrow


def take(tokens: Tensor, source: Tensor, before: Tensor) -> None:
    """Set ``tokens[i]`` to ``before[source[i]]`` where ``source (B,)`` is not negative; all int64, dense."""
    _take[(cdiv(len(tokens), _TILE),)](tokens, source, before, len(tokens), TILE=_TILE, num_warps=1)
