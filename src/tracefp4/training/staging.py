"""The guidance of a micro-batch in one buffer, which goes to the device in one copy.

A model of 48 layers has some two hundred sites with two to four tensors each. Moved one by one they cost as many
allocations and copies as there are tensors, each small; together they are one. So the padded tensors of all sites get
their places in one buffer first (an *arrangement*), are written there, and once the buffer is on the device they are
views of it::

    | planes of site 0, B * S rows | scales of site 0 | ... | planes of site 1 | ...      each from a multiple of 64

For a GPU the buffer lies in pinned memory, from which the copy runs while the host goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tracefp4.core import Site
from tracefp4.guidance.codec import chunks
from tracefp4.guidance.layout import align
from tracefp4.guidance.record import Record, SiteRecord

_FILL = {"planes": 0, "scales": 0, "global_scale": 1, "checks": 0}
"""What padding holds. Scale bytes of 0 round it to 0; a global scale of 0 would make that 0 times infinity."""

_Pads = dict[tuple[str, tuple[int, ...]], Tensor]
"""Padding by tensor's name and shape: sites of equal shape share it."""

_Views = dict[torch.dtype, Tensor]
"""The buffer as numbers of each dtype in it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one tensor of a site stands."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the padded tensor: ``(B, entries a sequence, ...)``."""
    start: int
    """Byte in the buffer."""

    def view(self, buffers: _Views) -> Tensor:
        """The tensor as records hold it: rows of all sequences in one axis, checks with a row a sequence."""
        shape = self.shape if self.name == "checks" else (self.shape[0] * self.shape[1], *self.shape[2:])
        strides = [1]
        for dim in shape[:0:-1]:
            strides.append(strides[-1] * dim)
        return buffers[self.dtype].as_strided(shape, strides[::-1], self.start // self.dtype.itemsize)

    def fill(self, buffers: _Views, parts: Sequence[Tensor | None], rows: Sequence[int], pads: _Pads) -> None:
        """Write the sequences' tensors, of ``rows`` rows each, and padding after each."""
        pieces: list[Tensor] = []
        for part, count in zip(parts, rows, strict=True):
            missing = self.shape[1]
            if part is not None:
                pieces.append(part)
                missing -= chunks(count) if self.name == "checks" else count
            if missing:
                shape = (missing, *self.shape[2:])
                if (self.name, shape) not in pads:
                    pads[self.name, shape] = torch.full(shape, _FILL[self.name], dtype=self.dtype)
                pieces.append(pads[self.name, shape])
        out = self.view(buffers)
        torch.cat(pieces, out=out.flatten(0, 1) if self.name == "checks" else out)


def stack_sites(
    records: Sequence[Record | None], like: Record, width: int, device: torch.device
) -> dict[Site, SiteRecord]:
    """The sites of several records as those of one batch.

    Args:
        records: one a sequence, of at most ``width`` rows each; ``None`` for a sequence without guidance.
        like: any of them; it says which sites there are, and their shapes.
        width: rows a sequence is padded to.
        device: where the result lies.

    Returns:
        For each site of ``like`` a record of ``B * width`` rows, its checks ``(B, ceil(width / 16))``. Padding and
        sequences without guidance hold zeros, and global scales of 1.
    """
    places, size = _arrange(like.sites, len(records), width)
    buffer = _host_buffer(size, device)
    views, pads = _views(buffer, places), _Pads()
    rows = [0 if record is None else record.rows for record in records]
    for site, group in places.items():
        parts = [None if record is None else record.sites[site] for record in records]
        for place in group:
            place.fill(views, [None if p is None else getattr(p, place.name) for p in parts], rows, pads)
    views = _views(buffer.to(device, non_blocking=True), places)
    return {
        site: replace(part, **{place.name: place.view(views) for place in places[site]})
        for site, part in like.sites.items()
    }


def _arrange(sites: Mapping[Site, SiteRecord], batch: int, width: int) -> tuple[dict[Site, list[_Place]], int]:
    """Places of all tensors, and the bytes of the buffer."""
    places: dict[Site, list[_Place]] = {}
    end = 0
    for site, part in sites.items():
        places[site] = []
        for name in _FILL:
            tensor: Tensor | None = getattr(part, name)
            if tensor is not None:
                shape = (batch, chunks(width) if name == "checks" else width, *tensor.shape[1:])
                places[site].append(_Place(name, tensor.dtype, shape, end))
                end = align(end + math.prod(shape) * tensor.dtype.itemsize)
    return places, end


def _views(buffer: Tensor, places: Mapping[Site, list[_Place]]) -> _Views:
    return {dtype: buffer.view(dtype) for dtype in {place.dtype for group in places.values() for place in group}}


def _host_buffer(size: int, device: torch.device) -> Tensor:
    """``size`` bytes of any content on the host, pinned for a GPU."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # NumPy asks the system for huge pages, PyTorch does not: first touching fresh memory then takes half as long.
    return torch.from_numpy(np.empty(size, dtype=np.uint8))
