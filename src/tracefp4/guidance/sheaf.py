"""The guidance of many rows in one buffer, on its way from an engine into frames.

Sequences that end together are gathered together, one after the other. A *sheaf* holds all their rows the way a frame
holds those of one sequence: it is the body of a frame (:mod:`tracefp4.guidance.layout`) that nobody sends. So it leaves
the device in one copy, and a frame is cut out of it run by run, not site by site. Bits that a checked plan does not
send lie beside it, and are handed out row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from tracefp4.core import Site
from tracefp4.errors import GuidanceError
from tracefp4.guidance.codec import CHUNK, code_checks, pack_scales, scale_checks
from tracefp4.guidance.layout import Layout, Parts, SiteTable, make_layout, places_of
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
    kept: tuple[Tensor, ...] = ()
    """Under a checked plan, for each run, what is not sent: planes uint8 ``(L, R, vectors, bits * width / 8)``."""
    arrival: torch.Event | None = None
    """What a host must wait for before it reads ``data``; see :meth:`arrays`."""
    _arrays: tuple[np.ndarray, np.ndarray] | None = None
    _kept_arrays: tuple[np.ndarray, ...] = ()

    @classmethod
    def new(cls, plan: Plan, table: SiteTable, valid: Tensor) -> Sheaf:
        """A sheaf without content, on the device of ``valid (R,)``."""
        layout = make_layout(plan, table, valid.numel(), None)
        bytes_of = partial(torch.empty, dtype=torch.uint8, device=valid.device)
        kept = []
        for run in table.runs if plan.checked else ():
            shape = table.shapes[run.sites[0]]
            kept.append(bytes_of(len(run.sites), layout.rows, shape.vectors, plan.bits * shape.width // 8))
        return cls.of(layout, bytes_of(layout.size), valid, tuple(kept))

    @classmethod
    def of(cls, layout: Layout, data: Tensor, valid: Tensor, kept: tuple[Tensor, ...] = ()) -> Sheaf:
        """A sheaf over existing bytes."""
        return cls(layout, data, valid, tuple(layout.parts(data, 0, run) for run in layout.table.runs), kept)

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
        if target.code_checks is None:
            target.planes[span].copy_(planes)
        else:
            self.kept[index][span].copy_(planes)
            target.code_checks[span].copy_(code_checks(planes.flatten(2), self.valid))
        target.scales[span].copy_(scales if bits == 8 else pack_scales(scales.contiguous(), bits))
        if target.global_scale is not None and global_scale is not None:
            target.global_scale[span].copy_(global_scale)
        if target.checks is not None:
            target.checks[span].copy_(scale_checks(scales.flatten(2), self.valid))

    def cpu(self) -> Sheaf:
        """The same sheaf on the host: one copy of the outcomes, one of what is valid.

        From a GPU the outcomes travel on a stream of their own, into pinned memory, while the engine goes on.
        """
        if self.data.device.type == "cpu":
            return self
        own = (self.data, *self.kept)
        if self.data.device.type != "cuda":
            data, *kept = (part.cpu() for part in own)
            return Sheaf.of(self.layout, data, self.valid.cpu(), tuple(kept))
        stream = _stream(self.data.device)
        stream.wait_stream(torch.cuda.current_stream(self.data.device))
        with torch.cuda.stream(stream):
            data, *kept = (torch.empty(part.shape, dtype=torch.uint8, pin_memory=True) for part in own)
            for target, part in zip((data, *kept), own, strict=True):
                target.copy_(part, non_blocking=True)
                part.record_stream(stream)
            arrival = stream.record_event()
        there = Sheaf.of(self.layout, data, self.valid.cpu(), tuple(kept))
        there.arrival = arrival
        return there

    def pull(self, site: Site, wanted: Sequence[tuple[tuple[int, int], np.ndarray]]) -> list[np.ndarray]:
        """Bits of rows of several sequences; a :data:`~tracefp4.guidance.store.Pull` of a checked plan's sheaf.

        Args:
            site: of the plan.
            wanted: where a sequence starts and how many rows it has, and rows int64 ``(n,)``, ascending,
                counted from there.

        Returns:
            For each sequence uint8 ``(n, vectors, bits * width / 8)``.

        Raises:
            GuidanceError: a row outside of the sequence, or a site that the sheaf lacks.
        """
        self.arrays()  # they have arrived
        if not self._kept_arrays:
            self._kept_arrays = tuple(part.numpy() for part in self.kept)
        place = places_of(self.layout.table).get(site) if self.kept else None
        if place is None:
            raise GuidanceError(f"no bits of site {site} were kept under plan {str(self.layout.plan)!r}")
        index, position = place
        kept, found = self._kept_arrays[index][position], []
        for (start, count), rows in wanted:
            if len(rows) and not 0 <= rows[0] <= rows[-1] < count:
                raise GuidanceError(f"rows {rows[0]} to {rows[-1]} were asked for of a sequence of {count} rows")
            found.append(kept[start : start + count].take(rows, axis=0))
        return found

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
