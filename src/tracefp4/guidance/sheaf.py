"""The guidance of many rows in one buffer, on its way from an engine into frames.

Sequences that end together are gathered together, one after the other. A *sheaf* holds all their rows the way a frame
holds those of one sequence: it is the body of a frame (:mod:`tracefp4.guidance.layout`) that nobody sends. So it leaves
the device in one copy, and a frame is cut out of it run by run, not site by site.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tracefp4.errors import GuidanceError
from tracefp4.guidance.codec import CHUNK, pack_scales, scale_checks
from tracefp4.guidance.layout import Layout, Parts, SiteTable, make_layout
from tracefp4.guidance.plan import Plan


@dataclass(slots=True)
class Sheaf:
    """Rows of several sequences. Each starts at a multiple of 16, so that checks never span two of them."""

    layout: Layout
    """Of ``R`` rows, without routes."""
    data: Tensor
    """uint8 ``(layout.size,)``."""
    valid: Tensor
    """bool ``(R,)``: the row was recorded; on the device of ``data``."""
    parts: tuple[Parts, ...]
    """Views of ``data``, one for each run of the table."""
    arrival: torch.Event | None = None
    """What a host must wait for before it reads ``data``; see :meth:`arrays`."""
    _arrays: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def new(cls, plan: Plan, table: SiteTable, valid: Tensor) -> Sheaf:
        """A sheaf without content, on the device of ``valid (R,)``."""
        layout = make_layout(plan, table, valid.numel(), None)
        return cls.of(layout, torch.empty(layout.size, dtype=torch.uint8, device=valid.device), valid)

    @classmethod
    def of(cls, layout: Layout, data: Tensor, valid: Tensor) -> Sheaf:
        """A sheaf over existing bytes."""
        return cls(layout, data, valid, tuple(layout.parts(data, 0, run) for run in layout.table.runs))

    def put(self, index: int, first: int, planes: Tensor, scales: Tensor, global_scale: Tensor | None) -> None:
        """Write outcomes of ``n`` sites of a run.

        Args:
            index: of the run.
            first: position in the run of the first of these sites.
            planes: uint8 ``(n, R, vectors, bits * width / 8)``, cut to the plan's bits.
            scales: uint8 ``(n, R, vectors, width / block)``, whole bytes.
            global_scale: float32 ``(n, R, vectors)`` if the sites have one a vector.
        """
        target, bits = self.parts[index], self.layout.plan.scale_bits
        span = slice(first, first + len(planes))
        target.planes[span].copy_(planes)
        target.scales[span].copy_(scales if bits == 8 else pack_scales(scales.contiguous(), bits))
        if target.global_scale is not None and global_scale is not None:
            target.global_scale[span].copy_(global_scale)
        if target.checks is not None:
            target.checks[span].copy_(scale_checks(scales.flatten(2), self.valid))

    def cpu(self) -> Sheaf:
        """The same sheaf on the host: one copy of the outcomes, one of what is valid.

        From a GPU the outcomes travel on a stream of their own, into pinned memory, while the engine goes on.
        """
        if self.data.device.type != "cuda":
            return self if self.data.device.type == "cpu" else Sheaf.of(self.layout, self.data.cpu(), self.valid.cpu())
        stream = _stream(self.data.device)
        stream.wait_stream(torch.cuda.current_stream(self.data.device))
        with torch.cuda.stream(stream):
            data = torch.empty(self.data.shape, dtype=torch.uint8, pin_memory=True)
            data.copy_(self.data, non_blocking=True)
            arrival = stream.record_event()
        self.data.record_stream(stream)
        there = Sheaf.of(self.layout, data, self.valid.cpu())
        there.arrival = arrival
        return there

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """``data`` and ``valid`` of a sheaf on the host; waits until they have arrived."""
        if self._arrays is None:
            if self.arrival is not None:
                self.arrival.synchronize()
            self._arrays = self.data.numpy(), self.valid.numpy()
        return self._arrays

    def check_rows(self, start: int, rows: int) -> None:
        """Refuse a sequence that is not within the sheaf, or starts within a chunk of the checks.

        Raises:
            GuidanceError: it does.
        """
        if start % CHUNK or not 0 <= start <= start + rows <= self.layout.rows:
            raise GuidanceError(
                f"a sequence of {rows} rows from {start} on is not in a sheaf of {self.layout.rows} rows, where "
                f"sequences start at multiples of {CHUNK}"
            )


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which sheaves leave a GPU."""
    return torch.cuda.Stream(device)
