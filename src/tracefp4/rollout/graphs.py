"""The decode step as CUDA graphs.

A decode step of a small batch launches thousands of short kernels, and launching them from Python takes longer than
running them. A CUDA graph records the launches once and replays them with one call. It fixes shapes and addresses, so
there is one graph for each pair of sizes that are rounded up: rows of the batch, filled with padding rows, and pages of
the context. Graphs are captured when a size is first met and share one memory pool.

Capture runs nothing, but kernels must have been loaded and tables made before: a step of padding rows goes first, which
writes only to the padding page. Steps that would have to wait for the host cannot be captured: experts are computed by
the ``dense`` strategy (:mod:`tracefp4.models.dispatch`), all experts for all rows, which pays off while there are few
of both. Larger batches run launch by launch as before.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import EngineError
from tracefp4.models.dispatch import DENSE_ROWS
from tracefp4.rollout.inputs import DecodeInputs, DecodeRow

Step = Callable[[DecodeInputs, bool, int], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: tuple[Tensor, ...]


class DecodeGraphs:
    """Captured decode steps.

    Args:
        step: the decode step, a function of its inputs' buffers.
        inputs: the static buffers.
        num_experts: experts of a layer; 0 without.
        max_batch: rows of the largest batch.
    """

    def __init__(self, step: Step, inputs: DecodeInputs, num_experts: int, max_batch: int) -> None:
        self._step, self._inputs, self._max_batch = step, inputs, max_batch
        self._num_experts = num_experts
        self._captured: dict[tuple[int, int, bool, int], _Captured] = {}
        self._pool: Any = None

    def fits(self, rows: int) -> bool:
        """Whether a batch of ``rows`` sequences may run as a graph."""
        return self.padded(rows) * self._num_experts <= DENSE_ROWS

    def padded(self, rows: int) -> int:
        """Rows of the graph that serves ``rows`` sequences: 1, 2, 4, 8, then multiples of 8."""
        size = next((s for s in (1, 2, 4) if rows <= s), -(-rows // 8) * 8)
        return min(size, self._max_batch)

    def run(
        self, rows: Items[DecodeRow], width: int, truncate: bool, top: int = 0, before: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Replay the step for ``rows``, capturing it first if its size is new.

        Args:
            rows: the sequences.
            width: pages of the block tables that they need.
            truncate: whether any row has top-k or top-p.
            top: how many of the likeliest tokens are returned.
            before: see :meth:`DecodeInputs.fill <tracefp4.rollout.inputs.DecodeInputs.fill>`.

        Returns:
            What the step returns, cut to ``rows``; buffers that the next replay overwrites.
        """
        return self.replay(len(rows), width, truncate, top, lambda b, w: self._inputs.fill(rows, b, w, before))

    def replay(
        self, rows: int, width: int, truncate: bool, top: int, fill: Callable[[int, int], object]
    ) -> tuple[Tensor, ...]:
        """As :meth:`run`, for ``rows`` sequences of which ``fill`` fills the buffers, for a batch and a width."""
        batch, width = self.padded(rows), self._padded_width(width)
        key = (batch, width, truncate, top)
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        fill(batch, width)
        captured = self._captured[key]
        captured.graph.replay()
        return tuple(part[:rows] for part in captured.result)

    def captured(self, rows: int, width: int, truncate: bool) -> torch.cuda.CUDAGraph:
        """The graph that :meth:`run` replays for these sizes, without top log-probabilities.

        Raises:
            EngineError: it was not captured yet.
        """
        key = (self.padded(rows), self._padded_width(width), truncate, 0)
        if key not in self._captured:
            raise EngineError(f"no decode step of {key[0]} rows and {key[1]} pages was captured; run one first")
        return self._captured[key].graph

    def _padded_width(self, width: int) -> int:
        """Widths grow by powers of two, to keep graphs few."""
        return min(1 << max(width - 1, 0).bit_length(), self._inputs.max_width)

    def _capture(self, batch: int, width: int, truncate: bool, top: int) -> _Captured:
        self._inputs.pad(batch, width)
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._step(self._inputs, truncate, top)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._step(self._inputs, truncate, top)
        self._pool = graph.pool()
        return _Captured(graph, result)
