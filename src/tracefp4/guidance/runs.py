"""The sites of a record, kept as few tensors.

A model of 30 layers has 120 sites with up to four tensors each, but only four shapes. A frame holds equal sites at
equal distances, so a decoded record is a dozen strided tensors, one for each part of each
:class:`~tracefp4.guidance.layout.Run`. What handles whole records, such as the staging of a micro-batch, works on
these; what asks for a site gets views of them, made when it asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tracefp4.core import Site
from tracefp4.guidance.layout import Layout, Parts, SiteTable, table_of
from tracefp4.guidance.record import SiteRecord


class Body(NamedTuple):
    """The frame that runs are views of."""

    frame: Tensor
    """uint8, all of it, on the host."""
    layout: Layout
    start: int
    """Where its body starts."""


class SiteRuns(Mapping[Site, SiteRecord]):
    """Records of sites by site, in the order of a frame.

    Args:
        table: which sites, and how they repeat.
        parts: the tensors of each run of the table.
        scale_bits: bits of each block scale: 8, 3 or 2.
        body: the frame that the tensors share their memory with, if there is one.
    """

    def __init__(self, table: SiteTable, parts: tuple[Parts, ...], scale_bits: int, body: Body | None = None) -> None:
        self.table, self.parts, self.scale_bits, self.body = table, parts, scale_bits, body
        self._made: dict[Site, SiteRecord] | None = None

    @classmethod
    def of(cls, sites: Mapping[Site, SiteRecord]) -> SiteRuns:
        """The same records as runs; a copy unless they are runs already. All have equal rows and bits."""
        if isinstance(sites, SiteRuns):
            return sites
        table = table_of([record.shape for record in sites.values()])
        parts = []
        for run in table.runs:
            members = [sites[shape.site] for shape in table.of(run)]
            planes, scales = (torch.stack([getattr(m, name) for m in members]) for name in ("planes", "scales"))
            names = ("global_scale", "code_checks", "checks")
            parts.append(Parts(planes, scales, *(_stack([getattr(m, name) for m in members]) for name in names)))
        bits = next(iter(sites.values())).scale_bits if sites else 8
        return cls(table, tuple(parts), bits)

    def settled(self) -> SiteRuns:
        """The same without checks of codes, once a trainer has given every record its bits.

        Bits are copied run by run, and each record here then has the copy, so that no more than a run is there twice.
        """
        parts = []
        for run, part in zip(self.table.runs, self.parts, strict=True):
            records = [self[shape.site] for shape in self.table.of(run)]
            planes = torch.stack([record.planes for record in records])
            for record, own in zip(records, planes.unbind(0), strict=True):
                record.planes = own
            parts.append(part._replace(planes=planes, code_checks=None))
        return SiteRuns(self.table, tuple(parts), self.scale_bits)

    def __getitem__(self, site: Site) -> SiteRecord:
        """The record of a site; raises :class:`KeyError` for one that was not recorded."""
        if self._made is None:
            self._made = self._make()
        return self._made[site]

    def __iter__(self) -> Iterator[Site]:
        """Sites in the order of a frame."""
        return (shape.site for shape in self.table.shapes)

    def __len__(self) -> int:
        """Number of sites."""
        return len(self.table.shapes)

    def _make(self) -> dict[Site, SiteRecord]:
        found: dict[Site, SiteRecord] = {}
        for run, parts in zip(self.table.runs, self.parts, strict=True):
            each = [[None] * len(run.sites) if part is None else part.unbind(0) for part in parts]
            for shape, planes, scales, wide, codes, checks in zip(self.table.of(run), *each, strict=True):
                found[shape.site] = SiteRecord(
                    shape, cast(Tensor, planes), cast(Tensor, scales), wide, checks, self.scale_bits, codes
                )
        return {shape.site: found[shape.site] for shape in self.table.shapes}


def _stack(tensors: list[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None
