"""Static buffers of a decode step.

A captured CUDA graph reads the addresses it was captured with, so everything that changes from step to step lives in
buffers that are allocated once for the largest batch; a smaller batch uses their beginning. On the host the same
numbers are collected in pinned memory and cross over in three copies: integers, floats, block tables.

A step may be prepared before the host knows the tokens that it forwards, while the step that samples them still runs.
Such rows say where in that step's result their token stands, and it is copied on the device. So the host writes its
memory for one step while the copies of another may not have begun, and has that memory twice.

Mostly the same sequences decode again, each one token further. Then nothing is collected from them: what the last step
was made of is kept in arrays, in which positions grow by one and a page is added here and there.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tracefp4.errors import EngineError
from tracefp4.kernels.runtime import usable
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.request import Sequence
from tracefp4.rollout.sampler import Draw

_INTEGERS = ("tokens", "positions", "tickets", "stream", "top_k", "state_rows", "source")
_FLOATS = ("temperature", "top_p")
_POSITIONS, _SOURCE = _INTEGERS.index("positions"), _INTEGERS.index("source")


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence of a decode step."""

    token: int
    """Not read if it has a source."""
    position: int
    pages: list[int]
    sequence: Sequence
    source: int = -1
    """Row of the step before that samples the token; -1 if the token is known."""


class _Host:
    """Pinned memory for one step."""

    def __init__(self, max_batch: int, max_width: int, pin: bool) -> None:
        self.integers = torch.zeros(len(_INTEGERS), max_batch, dtype=torch.int64, pin_memory=pin)
        self.floats = torch.zeros(len(_FLOATS), max_batch, dtype=torch.float32, pin_memory=pin)
        self.pages = torch.zeros(max_batch * max_width, dtype=torch.int64, pin_memory=pin)
        self.left = torch.cuda.Event() if pin else None
        """After the copies that read it."""

    def wait(self) -> None:
        """Return when it may be written."""
        if self.left is not None:
            self.left.synchronize()


class _Kept:
    """What the last step was made of."""

    def __init__(self, max_batch: int, max_width: int, padding_page: int) -> None:
        self.integers = np.zeros((len(_INTEGERS), max_batch), np.int64)
        self.floats = np.zeros((len(_FLOATS), max_batch), np.float32)
        self.pages = np.full((max_batch, max_width), padding_page, np.int64)
        """Past a sequence's end the padding page."""
        self.sequences: list[Sequence] = []
        self.counts: list[int] = []
        """Pages of each sequence."""
        self.rows = 0
        """Of the step, padding included."""


class DecodeInputs:
    """Inputs of a decode step of ``B`` rows; views of longer buffers.

    Args:
        max_batch: rows of the largest batch.
        max_width: pages of the longest possible sequence.
        padding_page: page of padding rows and of table entries past a sequence's end.
        padding_row: linear-attention state row of padding rows.
        device: where the step runs.
    """

    def __init__(
        self, max_batch: int, max_width: int, padding_page: int, padding_row: int, device: torch.device
    ) -> None:
        self.max_width = max_width
        self._padding_page, self._padding_row, self._device = padding_page, padding_row, device
        self._hosts = [_Host(max_batch, max_width, device.type == "cuda") for _ in range(2)]
        host = self._hosts[0]
        self._integers, self._floats, self._pages = (
            part.to(device, copy=True) for part in (host.integers, host.floats, host.pages)
        )
        self._batch, self._width = 0, 0
        self._kept = _Kept(max_batch, max_width, padding_page)

    def fill(self, rows: Items[DecodeRow], batch: int, width: int, before: Tensor | None = None) -> DecodeInputs:
        """Set the buffers for the next step.

        Args:
            rows: the sequences.
            batch: rows of the step, at least ``len(rows)``; the rest is padding.
            width: pages of the block tables.
            before: int64 tokens that the step before samples, on the device; needed if a row has a source.
        """
        padding = batch - len(rows)
        samplings = [row.sequence.request.sampling for row in rows]
        columns = {
            "tokens": [row.token for row in rows] + [0] * padding,
            "positions": [row.position for row in rows] + [0] * padding,
            "tickets": [row.sequence.ticket for row in rows] + [0] * padding,
            "stream": [row.sequence.stream for row in rows] + [0] * padding,
            "top_k": [s.top_k for s in samplings] + [0] * padding,
            "state_rows": [self._state_row(row) for row in rows] + [self._padding_row] * padding,
            "source": [row.source for row in rows] + [-1] * padding,
            "temperature": [s.temperature for s in samplings] + [1.0] * padding,
            "top_p": [s.top_p for s in samplings] + [1.0] * padding,
        }
        kept = self._kept
        kept.integers[:, :batch] = [columns[name] for name in _INTEGERS]
        kept.floats[:, :batch] = [columns[name] for name in _FLOATS]
        kept.pages[: max(batch, kept.rows)] = self._padding_page
        for table, row in zip(kept.pages, rows, strict=False):
            table[: len(row.pages)] = row.pages[: self.max_width]
        kept.sequences, kept.rows = [row.sequence for row in rows], batch
        kept.counts = [len(row.pages) for row in rows]
        self._upload(batch, width)
        if before is not None:
            self._take(before)
        return self

    def pad(self, batch: int, width: int) -> None:
        """Fill a step of padding rows only; what the last step was made of stays known."""
        kept, self._kept = self._kept, _Kept(batch, self.max_width, self._padding_page)
        try:
            self.fill([], batch, width)
        finally:
            self._kept = kept

    def follows(self, sequences: Items[Sequence]) -> bool:
        """Whether the last step was of these sequences, in this order."""
        return self._kept.sequences == sequences

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of the last step, with the one that it forwarded."""
        return 1 + int(self._kept.integers[_POSITIONS, : len(self._kept.sequences)].max())

    def advance(self, batch: int, width: int, before: Tensor) -> DecodeInputs:
        """Set the buffers for the same sequences, one token further, whose tokens the step before samples.

        Args:
            batch: see :meth:`fill`.
            width: pages of the block tables.
            before: int64 tokens of the sequences, on the device.
        """
        kept, count = self._kept, len(self._kept.sequences)
        kept.integers[_POSITIONS, :count] += 1
        kept.integers[_SOURCE, :count] = np.arange(count)
        for i, (sequence, known) in enumerate(zip(kept.sequences, kept.counts, strict=True)):
            if len(sequence.pages) != known:
                kept.counts[i] = len(sequence.pages)
                kept.pages[i, : kept.counts[i]] = sequence.pages
        if batch > kept.rows:
            raise EngineError(f"a step of {batch} rows cannot follow one of {kept.rows}")
        self._upload(batch, width)
        self._take(before)
        return self

    def _take(self, before: Tensor) -> None:
        """Fetch the tokens that the step before samples."""
        source = self._integer("source")
        if usable(before):
            from tracefp4.kernels.step import take

            take(self.tokens, source, before)
        else:
            self.tokens.copy_(torch.where(source < 0, self.tokens, before[source.clamp_min(0)]))

    def place(self, page_size: int, capture: Capture) -> tuple[Tensor, Tensor, Tensor]:
        """Slots ``(B,)`` int64, lengths ``(B,)`` int64 and tickets ``(B,)`` int32 of the rows, which are stamped."""
        if usable(self.pages):
            from tracefp4.kernels.step import place

            return place(self.pages, self.positions, self._integer("tickets"), capture.forwarded, page_size)
        page = self.pages.gather(1, torch.div(self.positions, page_size, rounding_mode="floor").unsqueeze(1))
        slots, tickets = page.squeeze(1) * page_size + self.positions % page_size, self.tickets
        capture.stamp(slots, tickets)
        return slots, self.positions + 1, tickets

    def _state_row(self, row: DecodeRow) -> int:
        state_row = row.sequence.state_row
        return self._padding_row if state_row is None else state_row

    def _upload(self, batch: int, width: int) -> None:
        """Copy what is kept to the device through pinned memory, without waiting, and set the size of the step."""
        self._hosts.reverse()
        host, kept, used = self._hosts[0], self._kept, batch * width
        host.wait()
        host.integers.numpy()[:, :batch] = kept.integers[:, :batch]
        host.floats.numpy()[:, :batch] = kept.floats[:, :batch]
        host.pages.numpy()[:used].reshape(batch, width)[...] = kept.pages[:batch, :width]
        self._batch, self._width = batch, width
        self._integers.copy_(host.integers, non_blocking=True)
        self._floats.copy_(host.floats, non_blocking=True)
        self._pages[:used].copy_(host.pages[:used], non_blocking=True)
        if host.left is not None:
            host.left.record()

    @property
    def tokens(self) -> Tensor:
        """``(B,)`` int64: the token that each row forwards."""
        return self._integer("tokens")

    @property
    def positions(self) -> Tensor:
        """``(B,)`` int64: its position."""
        return self._integer("positions")

    @property
    def tickets(self) -> Tensor:
        """``(B,)`` int32; 0, which no writer has, for padding."""
        return self._integer("tickets").to(torch.int32)

    @property
    def state_rows(self) -> Tensor:
        """``(B,)`` int64."""
        return self._integer("state_rows")

    @property
    def pages(self) -> Tensor:
        """``(B, W)`` int64 block tables."""
        return self._pages[: self._batch * self._width].view(self._batch, self._width)

    def draw(self, lengths: Tensor) -> Draw:
        """Sampling parameters, for rows of ``lengths (B,)``: the new token stands at the end."""
        temperature, top_p = (self._floats[i, : self._batch] for i in range(2))
        return Draw(self._integer("stream"), lengths, temperature, self._integer("top_k"), top_p)

    def _integer(self, name: str) -> Tensor:
        return self._integers[_INTEGERS.index(name), : self._batch]


def draw_of(sequences: Items[Sequence], positions: Items[int], device: torch.device) -> Draw:
    """Sampling parameters of sequences whose next tokens stand at ``positions``."""
    samplings = [s.request.sampling for s in sequences]
    integers = [[s.stream for s in sequences], list(positions), [s.top_k for s in samplings]]
    stream, position, top_k = torch.tensor(integers, dtype=torch.int64).to(device, non_blocking=True)
    floats = [[s.temperature for s in samplings], [s.top_p for s in samplings]]
    temperature, top_p = torch.tensor(floats, dtype=torch.float32).to(device, non_blocking=True)
    return Draw(stream, position, temperature, top_k, top_p)
