"""From finished sequences to guidance in the store.

When a sequence ends, its rows are gathered by slot before the slots are given away: expert sites from the record, K, V
and latents from the pool itself. All sequences that end in one step are gathered together, cut to the plan's bits and
summed up on the device, and cross to the host in one copy of the sheaf that they make; each becomes a frame when the
store takes it, which may be late, or never (:mod:`tracefp4.guidance.late_store`). Sites of a run are handled as one
tensor, so the number of operations does not grow with the number of layers.

Sequences stand one after the other, each padded to whole chunks of the scale checks, so that the checks of all of them
are computed at once. A rollout of ``N`` tokens has ``N - 1`` rows: the last sampled token was never forwarded.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tracefp4.core import Handle, SiteShape
from tracefp4.errors import EngineError
from tracefp4.formats import e2m1
from tracefp4.guidance.codec import CHUNK, chunks, pack_bits
from tracefp4.guidance.frame import pending_rows
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import token_hash
from tracefp4.guidance.sheaf import Sheaf
from tracefp4.guidance.store import Store, make_key
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.pool import KVPool, PageAllocator, StoredKV
from tracefp4.rollout.request import Sequence

ROWS_AT_ONCE = 32768
"""Rows gathered at once, which bounds the memory of a step in which many long sequences end."""

VALUES_AT_ONCE = 1 << 25
"""Values of a run whose codes are unpacked, or whose scales are summed up, at once: this bounds temporary memory."""


@dataclass(slots=True)
class Harvested:
    """What was gathered for one sequence, on the host."""

    routes: Tensor | None
    """``(rows, moe_layers, top_k)``."""
    guidance: Handle | None
    invalid_rows: int
    """Rows of the guidance that were not recorded."""


@dataclass(slots=True)
class _Group:
    """Sequences gathered together: ``R`` rows, those of ``sequences[i]`` from ``starts[i]``."""

    sequences: list[Sequence]
    starts: list[int]
    slots: Tensor
    """``(R,)`` int64."""
    expected: Tensor
    """``(R,)`` int32: the ticket that each row must carry; 0 for padding, which no writer has."""


class Harvester:
    """Gathers rows of finished sequences.

    Args:
        capture: recorded expert sites and routes.
        pool: K, V and latents.
        pages: slots of positions.
        plan: what is shipped; ``None`` for routes alone.
        numerics_hash: of the spec, for the record.
        store: where frames go; ``None`` only without a plan.
        device: of capture and pool.
    """

    def __init__(
        self,
        capture: Capture,
        pool: KVPool,
        pages: PageAllocator,
        plan: Plan | None,
        numerics_hash: str,
        store: Store | None,
        device: torch.device,
    ) -> None:
        self.capture, self.pool, self.pages = capture, pool, pages
        self.plan, self.numerics_hash, self.store, self.device = plan, numerics_hash, store, device

    def collect(self, sequences: Items[Sequence], weight_version: int) -> list[Harvested]:
        """Gather, encode and store; in the order of ``sequences``, which still own their pages."""
        found: list[Harvested] = []
        for members in _split(sequences):
            group = self._group(members)
            routes: Items[Tensor | None] = [None] * len(members)
            if self.capture.routes is not None:
                all_routes = self.capture.routes.index_select(0, group.slots).cpu()
                # Copies: a rollout must not keep the rows of its neighbours alive.
                routes = [part.clone() for part in _cut(group, all_routes)]
            if members[0].guidance and self.plan is not None and self.store is not None:
                found += self._ship(group, routes, self.plan, self.store, weight_version)
            else:
                found += [Harvested(part, None, 0) for part in routes]
        return found

    def _group(self, sequences: list[Sequence]) -> _Group:
        starts, end = [], 0
        for sequence in sequences:
            starts.append(end)
            end += chunks(sequence.length - 1) * CHUNK
        page = self.pages.page_size
        slots = np.full(end, self.pages.padding_page * page, np.int64)
        expected = np.zeros(end, np.int32)
        for sequence, start in zip(sequences, starts, strict=True):
            rows, prefix = sequence.length - 1, sequence.prefix_length
            own = np.array(sequence.pages)[:, None] * page + np.arange(page)
            slots[start : start + rows] = own.ravel()[:rows]
            expected[start : start + prefix] = sequence.prefix_ticket
            expected[start + prefix : start + rows] = sequence.ticket
        places = (torch.from_numpy(part).to(self.device) for part in (slots, expected))
        return _Group(sequences, starts, *places)

    def _ship(
        self, group: _Group, routes: Items[Tensor | None], plan: Plan, store: Store, weight_version: int
    ) -> list[Harvested]:
        sheaf = gather(self.capture, self.pool, group.slots, group.expected, plan).cpu()
        frames, missing, valid = [], [], sheaf.valid.numpy()
        for sequence, start in zip(group.sequences, group.starts, strict=True):
            rows = sequence.length - 1
            frame = pending_rows(
                sheaf,
                start,
                rows,
                token_hash=token_hash(sequence.tokens),
                numerics_hash=self.numerics_hash,
                weight_version=weight_version,
            )
            key = make_key(sequence.request.id, sequence.sample, sequence.arrival, f"v{weight_version}")
            frames.append((key, frame))
            missing.append(rows - int(np.count_nonzero(valid[start : start + rows])))
        return [Harvested(*row) for row in zip(routes, store.keep_all(frames), missing, strict=True)]


def gather(capture: Capture, pool: StoredKV | None, slots: Tensor, expected: Tensor, plan: Plan) -> Sheaf:
    """Read the rows of some slots and cut them to a plan's bits.

    Args:
        capture: recorded expert sites.
        pool: K, V and latents; ``None`` if the plan has none of them.
        slots: ``(R,)`` int64 on the device of ``capture``.
        expected: ``(R,)`` int32 ticket that each row must carry; 0 for padding, which no writer has.
        plan: what is kept.

    Returns:
        A sheaf of ``R`` rows, on the device of ``capture``.

    Raises:
        EngineError: the plan has KV sites and there is no pool.
    """
    table, recorded = capture.table, capture.read(slots)
    valid = (capture.stamps(slots) == expected) & (expected > 0)
    for rows in recorded:
        if rows is not None:
            valid &= (rows.tickets == expected[None, :, None]).all(dim=2).all(dim=0)
    sheaf = Sheaf.new(plan, table, valid)
    for index, (run, rows) in enumerate(zip(table.runs, recorded, strict=True)):
        shapes = table.of(run)
        for part in _parts(shapes, slots.numel()):
            if rows is None:
                planes, scales = _from_pool(shapes[part], pool, slots, plan)
                sheaf.put(index, part.start, planes, scales, None)
            else:
                wide = None if rows.global_scale is None else rows.global_scale[part]
                sheaf.put(index, part.start, rows.planes[part], rows.scales[part], wide)
    return sheaf


def _parts(shapes: Items[SiteShape], rows: int) -> Iterable[slice]:
    """Cut a run into parts of at most :data:`VALUES_AT_ONCE` values, or of one site."""
    step = max(1, VALUES_AT_ONCE // max(1, rows * shapes[0].values))
    return (slice(first, min(first + step, len(shapes))) for first in range(0, len(shapes), step))


def _from_pool(shapes: Items[SiteShape], pool: StoredKV | None, slots: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Planes and whole scales of KV sites of one run."""
    first, layers = shapes[0].site, [shape.site.layer for shape in shapes]
    if pool is None:
        raise EngineError(f"plan {str(plan)!r} records site {first}, but there is no pool to read it from")
    packed, scales = (part.to(slots.device) for part in pool.stored(layers, first.kind, slots))
    return pack_bits(e2m1.unpack(packed), plan.bits), scales


def _cut(group: _Group, tensor: Tensor) -> list[Tensor]:
    """Each sequence's rows of a tensor ``(R, ...)``."""
    return [tensor[a : a + s.length - 1] for a, s in zip(group.starts, group.sequences, strict=True)]


def _split(sequences: Items[Sequence]) -> Iterable[list[Sequence]]:
    """Cut into groups of at most :data:`ROWS_AT_ONCE` rows, or of one sequence, that all ship guidance or none does."""
    group: list[Sequence] = []
    rows = 0
    for sequence in sequences:
        if group and (rows + sequence.length > ROWS_AT_ONCE or group[0].guidance != sequence.guidance):
            yield group
            group, rows = [], 0
        group.append(sequence)
        rows += sequence.length
    if group:
        yield group
