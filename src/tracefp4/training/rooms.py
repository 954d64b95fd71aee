"""Room for a micro-batch in tensors that stay.

A CUDA graph reads the same addresses in every replay. So what a micro-batch brings along, routes and guidance, is
copied into tensors of a fixed size before each, in one gather a part of a run of sites.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from tracefp4.guidance.codec import chunks
from tracefp4.guidance.layout import Parts
from tracefp4.guidance.runs import SiteRuns
from tracefp4.training.batch import GuidedRows, Routes

_KINDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def kind_of(guidance: GuidedRows | None) -> Hashable:
    """What of guidance decides which launches there are."""
    if guidance is None:
        return None
    runs = SiteRuns.of(guidance.sites)
    shapes = tuple(None if part is None else (*part.shape[:1], *part.shape[2:]) for p in runs.parts for part in p)
    return guidance.complete, runs.table.shapes, runs.scale_bits, shapes


def room_for_routes(routes: Routes, rows: int) -> Routes:
    """Tensors for the routes of ``rows`` rows."""
    layers, _, top_k = routes.experts.shape
    known = None if routes.known is None else routes.known.new_zeros(layers, rows, 1)
    return Routes(routes.experts.new_zeros(layers, rows, top_k), known)


def room_for_guidance(guidance: GuidedRows, size: tuple[int, int]) -> GuidedRows:
    """Tensors for guidance of a micro-batch of ``size`` with the same sites, whose bits came along or were found."""
    batch, width = size
    runs = SiteRuns.of(guidance.sites)
    parts = []
    for planes, scales, wide, _, checks in runs.parts:
        kept = None if checks is None else checks.new_zeros(checks.shape[0], batch, chunks(width))
        wide = None if wide is None else _rows_like(wide, batch * width)
        parts.append(Parts(_rows_like(planes, batch * width), _rows_like(scales, batch * width), wide, None, kept))
    sites = SiteRuns(runs.table, tuple(parts), runs.scale_bits)
    guided = torch.zeros(batch * width, dtype=torch.bool, device=guidance.guided.device)
    return GuidedRows(guided, guidance.complete, 0, sites)


def _rows_like(tensor: Tensor, rows: int) -> Tensor:
    return tensor.new_zeros(tensor.shape[0], rows, *tensor.shape[2:])


def copy_guidance(
    source: GuidedRows, target: GuidedRows, own: tuple[int, int], size: tuple[int, int], places: Tensor, cut: Tensor
) -> None:
    """Write a micro-batch's guidance into a room for it.

    Args:
        source: of ``own`` sequences and rows.
        target: of ``size`` sequences and rows.
        own: see ``source``.
        size: see ``target``.
        places: for each row of ``target`` the row of ``source`` that it repeats, int64.
        cut: the same for the chunks of checks.
    """
    (batch, rows), (most, width) = own, size
    target.guided.zero_()
    target.guided.view(most, width)[:batch, :rows] = source.guided.view(batch, rows)
    for mine, theirs in zip(SiteRuns.of(target.sites).parts, SiteRuns.of(source.sites).parts, strict=True):
        *row_parts, checks = zip(mine, theirs, strict=True)
        for into, part in row_parts:
            if into is not None and part is not None:
                torch.index_select(_wide(part), 1, places, out=_wide(into))
        into, part = checks
        if into is not None and part is not None:
            torch.index_select(part.flatten(1), 1, cut, out=into.flatten(1))


def _wide(part: Tensor) -> Tensor:
    """A view ``(sites, rows, n)`` of contiguous ``(sites, rows, ...)`` in the widest integers a row is made of.

    A gather takes one element at a time, however small, and rows of planes and scales are bytes.
    """
    rows = part.unsqueeze(-1).flatten(2).view(torch.uint8)
    return rows.view(next(kind for kind in _KINDS if rows.shape[2] % kind.itemsize == 0))
