"""Static buffers of a decode step.

A captured CUDA graph reads the addresses it was captured with, so everything that changes from step to step lives in
buffers that are allocated once for the largest batch; a smaller batch uses their beginning. On the host the same
numbers are collected in pinned memory and cross over in three copies: integers, floats, block tables.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.rollout.request import Sequence
from tracefp4.rollout.sampler import Draw

_INTEGERS = ("tokens", "positions", "tickets", "stream", "top_k", "state_rows")
_FLOATS = ("temperature", "top_p")


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence of a decode step."""

    token: int
    position: int
    pages: list[int]
    sequence: Sequence


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
        pin = device.type == "cuda"
        self._host_integers = torch.zeros(len(_INTEGERS), max_batch, dtype=torch.int64, pin_memory=pin)
        self._host_floats = torch.zeros(len(_FLOATS), max_batch, dtype=torch.float32, pin_memory=pin)
        self._host_pages = torch.zeros(max_batch * max_width, dtype=torch.int64, pin_memory=pin)
        self._integers = self._host_integers.to(device, copy=True)
        self._floats = self._host_floats.to(device, copy=True)
        self._pages = self._host_pages.to(device, copy=True)
        self._batch, self._width = 0, 0

    def fill(self, rows: Items[DecodeRow], batch: int, width: int) -> DecodeInputs:
        """Set the buffers for the next step.

        Args:
            rows: the sequences.
            batch: rows of the step, at least ``len(rows)``; the rest is padding.
            width: pages of the block tables.
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
            "temperature": [s.temperature for s in samplings] + [1.0] * padding,
            "top_p": [s.top_p for s in samplings] + [1.0] * padding,
        }
        self._host_integers[:, :batch] = torch.tensor([columns[name] for name in _INTEGERS], dtype=torch.int64)
        self._host_floats[:, :batch] = torch.tensor([columns[name] for name in _FLOATS], dtype=torch.float32)
        table = [(row.pages + [self._padding_page] * (width - len(row.pages)))[:width] for row in rows]
        table += [[self._padding_page] * width] * padding
        self._host_pages[: batch * width] = torch.tensor(table, dtype=torch.int64).flatten()
        return self.upload(batch, width)

    def _state_row(self, row: DecodeRow) -> int:
        state_row = row.sequence.state_row
        return self._padding_row if state_row is None else state_row

    def upload(self, batch: int, width: int) -> DecodeInputs:
        """Copy host buffers to the device, without waiting, and set the size of the step."""
        self._batch, self._width = batch, width
        self._integers.copy_(self._host_integers, non_blocking=True)
        self._floats.copy_(self._host_floats, non_blocking=True)
        used = batch * width
        self._pages[:used].copy_(self._host_pages[:used], non_blocking=True)
        return self

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

    def draw(self) -> Draw:
        """Sampling parameters: the new token stands one position further."""
        temperature, top_p = (self._floats[i, : self._batch] for i in range(2))
        return Draw(self._integer("stream"), self.positions + 1, temperature, self._integer("top_k"), top_p)

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
