"""What the sites have to know of the forward pass in flight: where its tokens go, and what each may look at.

There are two shapes of forward. *Prefill* packs pieces of several sequences into one row of ``T`` tokens, each of which
looks at its own sequence alone. *Decode* is one token of each of ``B`` sequences, and attention takes all of
them at once over contexts of a common length ``L``, masked to their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """The newest tokens of several sequences, packed one after the other, and where each sequence is stored."""

    counts: tuple[int, ...]
    """Tokens of each piece."""
    contexts: tuple[int, ...]
    """Tokens of each sequence up to its piece's last one."""
    slots: Tensor
    """``(sum of contexts,)`` int64: those of each sequence in order, one sequence after the other."""
    table: Tensor
    """``(n, 4)`` int64 on the device: first row of each piece, its rows, first of its slots, how many."""

    @classmethod
    def pack(cls, counts: Sequence[int], contexts: Sequence[int], slots: Tensor) -> Pieces:
        """Pieces of ``counts[i]`` tokens of sequences with ``contexts[i]`` slots each."""
        rows, starts = accumulate(counts, initial=0), accumulate(contexts, initial=0)
        table = [list(entry) for entry in zip(rows, counts, starts, contexts, strict=False)]
        return cls(tuple(counts), tuple(contexts), slots, torch.tensor(table).to(slots.device, non_blocking=True))

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows of each piece, and the slots ``(c,)`` of its sequence."""
        rows, start = 0, 0
        for count, context in zip(self.counts, self.contexts, strict=True):
            yield slice(rows, rows + count), self.slots[start : start + context]
            rows, start = rows + count, start + context


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """``T`` tokens of several sequences, packed."""

    slots: Tensor
    """``(T,)`` int64: slot of each token."""
    tickets: Tensor
    """``(T,)`` int32: left beside each recorded row."""
    pieces: Pieces


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each of ``B`` sequences. Static shapes, no host values: it can be captured in a CUDA graph."""

    slots: Tensor
    """``(B,)`` int64."""
    tickets: Tensor
    """``(B,)`` int32."""
    context: Callable[[], Tensor]
    """``(B, L)`` int64: slots of positions ``0..L-1``; beyond the sequence's end any slot that may be read. Found when
    it is first asked for, as kernels read ``pages``."""
    lengths: Tensor
    """``(B,)`` int64: tokens to attend to, the current one included."""
    pages: Tensor
    """``(B, W)`` int64 block tables, what ``context`` is made of."""
    page_size: int
    state_rows: Tensor | None = None
    """``(B,)`` int64: rows of the sequences' linear-attention states; ``None`` without linear layers."""


Batch = PrefillBatch | DecodeBatch
