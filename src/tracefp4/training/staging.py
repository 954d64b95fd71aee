"""The guidance of a micro-batch in one buffer, which goes to the device in one copy.

A model of 48 layers has some two hundred sites with two to four tensors each. Moved one by one they cost as many
allocations and copies as there are tensors, each small. So the padded tensors get their places in one buffer first (an
*arrangement*), are written there run by run (:mod:`tracefp4.guidance.runs`), a dozen copies a sequence however many
layers there are and sequences side by side, and once the buffer is on the device the sites are views of it::

    | planes of run 0: sites x B x S rows | scales of run 0 | ... | planes of run 1 | ...   each from a multiple of 64

For a GPU the buffer lies in pinned memory, from which the copy runs while the host goes on. Records that are frames in
pinned memory need no such work of the host: the frames are copied as they are, and a kernel takes them apart
(:mod:`tracefp4.kernels.stack`). Nothing here waits for the device, so the host can do other work meanwhile; whoever has
the records must keep them until the device is through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from tracefp4.errors import GuidanceMismatch
from tracefp4.guidance.codec import chunks
from tracefp4.guidance.layout import Parts, align, strips
from tracefp4.guidance.record import Record
from tracefp4.guidance.runs import Body, SiteRuns
from tracefp4.guidance.workers import side_by_side
from tracefp4.kernels.runtime import usable

_FILL = (0, 0, 1, 0, 0)
"""What padding holds of planes, scales, global scales, and checks of codes and scales. Scale bytes of 0 round it to 0;
a global scale of 0 would make that 0 times infinity."""
_ONE = 0x3F800000
"""The bits of 1 in float32."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one part of a run stands."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """``(sites, B, entries a sequence, ...)``."""
    start: int
    """Byte in the buffer."""

    @property
    def stop(self) -> int:
        """First byte after it."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The part in a buffer."""
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)


def stack_sites(records: Sequence[Record | None], like: Record, width: int, device: torch.device) -> SiteRuns:
    """The sites of several records as those of one batch.

    Args:
        records: one a sequence, of at most ``width`` rows each; ``None`` for a sequence without guidance.
        like: any of them; it says which sites there are, and their shapes.
        width: rows a sequence is padded to.
        device: where the result lies.

    Returns:
        For each site of ``like`` a record of ``B * width`` rows, its checks ``(B, ceil(width / 16))``. Padding and
        sequences without guidance hold zeros, and global scales of 1. On a GPU the copies may still be under way on the
        current stream: keep ``records`` until it is through.

    Raises:
        GuidanceMismatch: the records are of different sites.
    """
    first = SiteRuns.of(like.sites)
    places, size = _arrange(first, len(records), width)
    bodies = _bodies(records, first, device)
    if bodies is not None:
        return _sites(first, places, _stack_frames(bodies, places, size, device))
    buffer = _host_buffer(size, device)
    # Arrays, because PyTorch would give each of our threads threads of its own.
    targets = [[None if place is None else place.view(buffer).numpy() for place in group] for group in places]

    def write(b: int, record: Record | None) -> None:
        runs = None if record is None else SiteRuns.of(record.sites)
        if runs is not None and runs.table.shapes != first.table.shapes:
            raise GuidanceMismatch(f"sequence {b} of the micro-batch has guidance of other sites than another one")
        for index, group in enumerate(targets):
            parts = (None,) * len(_FILL) if runs is None else runs.parts[index]
            for target, part, fill in zip(group, parts, _FILL, strict=True):
                if target is not None:
                    _write(target[:, b], part, fill)

    side_by_side([partial(write, b, record) for b, record in enumerate(records)])
    return _sites(first, places, buffer.to(device, non_blocking=True))


def _bodies(records: Sequence[Record | None], like: SiteRuns, device: torch.device) -> list[Body | None] | None:
    """The frames of the records, if a kernel can take them apart; else ``None``."""
    if like.body is None or not usable(torch.empty(0, device=device)):
        return None
    bodies: list[Body | None] = []
    for record in records:
        body = None
        if record is not None:
            body = record.sites.body if isinstance(record.sites, SiteRuns) else None
            if body is None or body.layout.table is not like.table or body.layout.plan != like.body.layout.plan:
                return None
            if device.type == "cuda" and not body.frame.is_pinned():
                return None
        bodies.append(body)
    return bodies


def _stack_frames(
    bodies: Sequence[Body | None], places: Sequence[Sequence[_Place | None]], size: int, device: torch.device
) -> Tensor:
    """The buffer of :func:`stack_sites`, made on its device."""
    from tracefp4.kernels.stack import stack

    checked = next(body.layout.plan.checked for body in bodies if body is not None)
    order = ("code_checks" if checked else "planes", "scales", "global_scale", "checks")  # that of strips
    filled: list[tuple[_Place, int]] = []
    for group in places:
        named = dict(zip(Parts._fields, zip(group, _FILL, strict=True), strict=True))
        filled += [(place, fill) for place, fill in (named[name] for name in order) if place is not None]
    rooms = [math.prod(place.shape[2:]) * place.dtype.itemsize for place, _ in filled]
    targets = [
        (place.shape[0], room, place.start, _ONE if fill else 0)
        for (place, fill), room in zip(filled, rooms, strict=True)
    ]
    sources = np.zeros((len(filled), len(bodies), 3), np.int64)
    room, begins = 0, [0] * len(bodies)
    for b, body in enumerate(bodies):
        if body is None:
            continue
        begins[b] = room
        for s, strip in enumerate(strips(body.layout)):
            sources[s, b] = room + body.start + strip.start, strip.step, strip.length
        room += align(len(body.frame))
    # Before the frames: a copy from memory that is not pinned waits for those in front of it.
    tables = (torch.from_numpy(sources).to(device), torch.tensor(targets, dtype=torch.int64).to(device))
    frames = torch.empty(room, dtype=torch.uint8, device=device)
    for begin, body in zip(begins, bodies, strict=True):
        if body is not None:
            frames[begin : begin + len(body.frame)].copy_(body.frame, non_blocking=True)
    out = torch.empty(size, dtype=torch.uint8, device=device)
    stack(frames, *tables, out, max(place.shape[0] for place, _ in filled), max(rooms))
    return out


def _write(target: np.ndarray, part: Tensor | None, fill: int) -> None:
    """Write a sequence's part ``(sites, entries, ...)`` and padding after it."""
    count = 0 if part is None else part.shape[1]
    if part is not None:
        target[:, :count] = part.cpu().numpy()
    target[:, count:] = fill


def _sites(runs: SiteRuns, places: Sequence[Sequence[_Place | None]], buffer: Tensor) -> SiteRuns:
    """Sites as views of the buffer: rows of all sequences in one axis, checks with a row a sequence."""
    parts = []
    for group in places:
        *rows, checks = [None if place is None else place.view(buffer) for place in group]
        planes, scales, wide, codes = (cast(Tensor, None if part is None else part.flatten(1, 2)) for part in rows)
        parts.append(Parts(planes, scales, wide, codes, checks))
    return SiteRuns(runs.table, tuple(parts), runs.scale_bits)


def _arrange(runs: SiteRuns, batch: int, width: int) -> tuple[list[list[_Place | None]], int]:
    """Places of the parts of each run, and the bytes of the buffer."""
    places: list[list[_Place | None]] = []
    end = 0
    for parts in runs.parts:
        group: list[_Place | None] = []
        for name, part in zip(Parts._fields, parts, strict=True):
            if part is None:
                group.append(None)
                continue
            entries = chunks(width) if name == "checks" else width
            place = _Place(part.dtype, (part.shape[0], batch, entries, *part.shape[2:]), end)
            group.append(place)
            end = align(place.stop)
        places.append(group)
    return places, end


def _host_buffer(size: int, device: torch.device) -> Tensor:
    """``size`` bytes of any content on the host, pinned for a GPU."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # NumPy asks the system for huge pages, PyTorch does not: first touching fresh memory then takes half as long.
    return torch.from_numpy(np.empty(size, dtype=np.uint8))
