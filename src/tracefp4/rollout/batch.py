"""What the sites have to know of the forward pass in flight: where its tokens go, and what each may look at.

There are two shapes of forward. *Prefill* packs pieces of several sequences into one row of ``T`` tokens, and
attention takes one piece after the other. *Decode* is one token of each of ``B`` sequences, and attention takes all of
them at once over contexts of a common length ``L``, masked to their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of one sequence in a prefill."""

    start: int
    """First row of the packed forward."""
    stop: int
    context: Tensor
    """``(c,)`` int64: slots of every token of the sequence up to the piece's last one, in order."""


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """``T`` tokens of several sequences, packed."""

    slots: Tensor
    """``(T,)`` int64: slot of each token."""
    tickets: Tensor
    """``(T,)`` int32: left beside each recorded row."""
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each of ``B`` sequences. Static shapes, no host values: it can be captured in a CUDA graph."""

    slots: Tensor
    """``(B,)`` int64."""
    tickets: Tensor
    """``(B,)`` int32."""
    context: Tensor
    """``(B, L)`` int64: slots of positions ``0..L-1``; beyond the sequence's end any slot that may be read."""
    lengths: Tensor
    """``(B,)`` int64: tokens to attend to, the current one included."""
    pages: Tensor
    """``(B, W)`` int64 block tables, what ``context`` was made of."""
    page_size: int
    state_rows: Tensor | None = None
    """``(B,)`` int64: rows of the sequences' linear-attention states; ``None`` without linear layers."""


Batch = PrefillBatch | DecodeBatch
