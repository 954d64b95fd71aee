"""The guidance of many rows in one buffer, on its way from an engine into frames.

Sequences that end together are gathered together, one after the other. A *sheaf* holds all their rows the way a frame
holds those of one sequence: it is the body of a frame (:mod:`tracefp4.guidance.layout`) that nobody sends. So it leaves
the device in one copy (:mod:`tracefp4.guidance.ring`), and a frame is cut out of it run by run, not site by site. Bits
that a checked plan does not send lie beside it, and are handed out row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tracefp4.core import Site
from tracefp4.errors import GuidanceError
from tracefp4.guidance.codec import CHUNK, code_checks, pack_scales, scale_checks
from tracefp4.guidance.layout import Layout, Parts, SiteTable, make_layout, places_of
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.ring import Parcel


@dataclass(frozen=True, eq=False, slots=True)
class Sheaf:
    """Rows of several sequences. Each starts at a multiple of 16, so that checks never span two of them."""

    layout: Layout
    """Of ``R`` rows, without routes."""
    parcel: Parcel
    """Its tensors, see :attr:`tensors`; further ones may have travelled with them."""
    parts: tuple[Parts, ...]
    """Views of ``data``, one for each run of the table; none of a sheaf that was sent, to which nobody writes."""

    @classmethod
    def new(cls, plan: Plan, table: SiteTable, valid: Tensor) -> Sheaf:
        """A sheaf without content, on the device of ``valid (R,)``."""
        layout = make_layout(plan, table, valid.numel(), None)
        bytes_of = partial(torch.empty, dtype=torch.uint8, device=valid.device)
        kept, data = [], bytes_of(layout.size)
        for run in table.runs if plan.checked else ():
            shape = table.shapes[run.sites[0]]
            kept.append(bytes_of(len(run.sites), layout.rows, shape.vectors, plan.bits * shape.width // 8))
        return cls(layout, Parcel((data, valid, *kept)), tuple(layout.parts(data, 0, run) for run in table.runs))

    def sent(self, parcel: Parcel) -> Sheaf:
        """The same sheaf on the host, whose :attr:`tensors` came as the first of ``parcel``."""
        return Sheaf(self.layout, parcel, ())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """``data``, ``valid`` and ``kept``, once they have arrived."""
        count = 2 + (len(self.layout.table.runs) if self.layout.plan.checked else 0)
        return self.parcel.open()[:count]

    @property
    def data(self) -> Tensor:
        """The body, uint8 ``(layout.size,)``."""
        return self.tensors[0]

    @property
    def valid(self) -> Tensor:
        """Which rows were recorded, bool ``(R,)``; on the device of ``data``."""
        return self.tensors[1]

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Under a checked plan, for each run, what is not sent: planes uint8 ``(L, R, vectors, bits * width / 8)``."""
        return self.tensors[2:]

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
        kept = self.kept
        place = places_of(self.layout.table).get(site) if kept else None
        if place is None:
            raise GuidanceError(f"no bits of site {site} were kept under plan {str(self.layout.plan)!r}")
        index, position = place
        bits, found = kept[index][position].numpy(), []
        for (start, count), rows in wanted:
            if len(rows) and not 0 <= rows[0] <= rows[-1] < count:
                raise GuidanceError(f"rows {rows[0]} to {rows[-1]} were asked for of a sequence of {count} rows")
            found.append(bits[start : start + count].take(rows, axis=0))
        return found

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """``data`` and ``valid`` of a sheaf on the host; waits until they have arrived."""
        data, valid, *_ = self.tensors
        return data.numpy(), valid.numpy()

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
