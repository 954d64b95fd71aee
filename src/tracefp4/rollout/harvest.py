"""From finished sequences to guidance in the store.

When a sequence ends, its rows are gathered by slot before the slots are given away: expert sites from the record, K, V
and latents from the pool itself. All sequences that end in one step are gathered together, cut to the plan's bits and
summed up on the device, and cross to the host in one copy for each tensor; then each becomes a frame.

Sequences stand one after the other, each padded to whole chunks of the scale checks, so that the checks of all of them
are computed at once. A rollout of ``N`` tokens has ``N - 1`` rows: the last sampled token was never forwarded.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.core import KV_KINDS, Handle, Site, SiteShape
from tracefp4.errors import EngineError
from tracefp4.formats import e2m1
from tracefp4.guidance.codec import CHUNK, chunks, pack_scales, scale_checks
from tracefp4.guidance.frame import encode
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, token_hash
from tracefp4.guidance.store import Store, make_key
from tracefp4.rollout.capture import Capture, Rows
from tracefp4.rollout.pool import KVPool, PageAllocator, StoredKV
from tracefp4.rollout.request import Sequence

ROWS_AT_ONCE = 32768
"""Rows gathered at once, which bounds the memory of a step in which many long sequences end."""


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
        slots: list[int] = []
        expected: list[int] = []
        starts = []
        padding = self.pages.padding_page * self.pages.page_size
        for sequence in sequences:
            rows = sequence.length - 1
            starts.append(len(slots))
            slots += self.pages.slots(sequence.pages, 0, rows) + [padding] * (-rows % CHUNK)
            own = rows - sequence.prefix_length
            expected += [sequence.prefix_ticket] * sequence.prefix_length + [sequence.ticket] * own
            expected += [0] * (-rows % CHUNK)
        return _Group(
            sequences,
            starts,
            torch.tensor(slots, dtype=torch.int64).to(self.device),
            torch.tensor(expected, dtype=torch.int32).to(self.device),
        )

    def _ship(
        self, group: _Group, routes: Items[Tensor | None], plan: Plan, store: Store, weight_version: int
    ) -> list[Harvested]:
        valid, sites = gather(self.capture, self.pool, group.slots, group.expected, plan)
        all_valid, all_sites = valid.cpu(), {site: record.to("cpu") for site, record in sites.items()}
        found = []
        for sequence, start, part, ok in zip(
            group.sequences, group.starts, routes, _cut(group, all_valid), strict=True
        ):
            rows = sequence.length - 1
            record = Record(
                plan=str(plan),
                token_hash=token_hash(sequence.tokens),
                numerics_hash=self.numerics_hash,
                weight_version=weight_version,
                rows=rows,
                valid=ok,
                sites={site: _rows_of(record, start, rows) for site, record in all_sites.items()},
            )
            key = make_key(sequence.request.id, sequence.sample, sequence.arrival, f"v{weight_version}")
            found.append(Harvested(part, store.put(key, encode(record)), int((~ok).sum())))
        return found


def gather(
    capture: Capture, pool: StoredKV | None, slots: Tensor, expected: Tensor, plan: Plan
) -> tuple[Tensor, dict[Site, SiteRecord]]:
    """Read the rows of some slots and cut them to a plan's bits.

    Args:
        capture: recorded expert sites.
        pool: K, V and latents; ``None`` if the plan has none of them.
        slots: ``(R,)`` int64 on the device of ``capture``.
        expected: ``(R,)`` int32 ticket that each row must carry; 0 for padding, which no writer has.
        plan: what is kept.

    Returns:
        Validity ``(R,)`` and a record of every site, on the device of ``capture``.

    Raises:
        EngineError: the plan has KV sites and there is no pool.
    """
    experts: dict[Site, Rows] = {
        shape.site: capture.read(shape.site, slots) for shape in capture.shapes if shape.site.kind not in KV_KINDS
    }
    valid = (capture.stamps(slots) == expected) & (expected > 0)
    for rows in experts.values():
        valid &= (rows.tickets == expected.unsqueeze(1)).all(dim=1)
    sites = {}
    for shape in capture.shapes:
        rows = experts.get(shape.site)
        sites[shape.site] = (
            _from_pool(shape, pool, slots, valid, plan)
            if rows is None
            else _pack(shape, rows.planes, rows.scales, rows.global_scale, valid, plan)
        )
    return valid, sites


def _from_pool(shape: SiteShape, pool: StoredKV | None, slots: Tensor, valid: Tensor, plan: Plan) -> SiteRecord:
    if pool is None:
        raise EngineError(f"plan {str(plan)!r} records site {shape.site}, but there is no pool to read it from")
    packed, scales = (part.to(slots.device) for part in pool.stored(shape.site.layer, shape.site.kind, slots))
    return SiteRecord.pack(shape, e2m1.unpack(packed), scales, None, plan.bits, plan.scale_bits, valid)


def _pack(
    shape: SiteShape, planes: Tensor, scales: Tensor, global_scale: Tensor | None, valid: Tensor, plan: Plan
) -> SiteRecord:
    """Cut whole scales to the plan's bits; the planes were cut when they were recorded."""
    checks = None if plan.scale_bits == 8 else scale_checks(scales.flatten(1), valid)
    packed = pack_scales(scales.contiguous(), plan.scale_bits)
    return SiteRecord(shape, planes.contiguous(), packed, global_scale, checks, plan.scale_bits)


def _rows_of(record: SiteRecord, start: int, rows: int) -> SiteRecord:
    """One sequence's part of a group's record; its checks are those of its own chunks."""
    part = record.slice(start, start + rows, checks=False)
    if record.checks is not None:
        part.checks = record.checks[start // CHUNK : start // CHUNK + chunks(rows)]
    return part


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
