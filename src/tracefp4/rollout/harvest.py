"""From finished sequences to guidance in the store.

When a sequence ends, its rows are gathered by slot before the slots are given away: expert sites from the record, K, V
and latents from the pool itself. Scales are cut to the plan's bits and summed up on the device. All sequences that end
in one step cross to the host in one copy for each dtype; then each becomes a frame.

A rollout of ``N`` tokens has ``N - 1`` rows: the last sampled token was never forwarded.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.core import KV_KINDS, Handle, SiteShape
from tracefp4.formats import e2m1
from tracefp4.guidance.codec import pack_scales, scale_checks
from tracefp4.guidance.frame import encode
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, token_hash
from tracefp4.guidance.store import Store, make_key
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.pool import KVPool, PageAllocator
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
        for group in _groups(sequences):
            gathered = [self._gather(sequence) for sequence in group]
            arrived = iter(to_host([tensor for tensors in gathered for tensor in tensors]))
            for sequence, tensors in zip(group, gathered, strict=True):
                found.append(self._finish(sequence, [next(arrived) for _ in tensors], weight_version))
        return found

    def _ships(self, sequence: Sequence) -> bool:
        return sequence.guidance and self.plan is not None and self.store is not None

    def _gather(self, sequence: Sequence) -> list[Tensor]:
        """Device tensors of one sequence: routes, then validity, then the tensors of each site in order."""
        rows = sequence.length - 1
        slots = torch.tensor(self.pages.slots(sequence.pages, 0, rows), dtype=torch.int64).to(self.device)
        routes = [] if self.capture.routes is None else [self.capture.routes.index_select(0, slots)]
        if not self._ships(sequence):
            return routes
        position = torch.arange(rows, device=self.device)
        expected = torch.where(position < sequence.prefix_length, sequence.prefix_ticket, sequence.ticket)
        valid = self.capture.stamps(slots) == expected
        read = {s.site: self.capture.read(s.site, slots) for s in self.capture.shapes if s.site.kind not in KV_KINDS}
        for outcome in read.values():
            valid &= (outcome.tickets == expected.unsqueeze(1)).all(dim=1)
        tensors: list[Tensor] = []
        for shape in self.capture.shapes:
            outcome = read.get(shape.site)
            if outcome is None:
                record = self._from_pool(shape, slots, valid)
            else:
                record = self._pack(shape, outcome.planes, outcome.scales, outcome.global_scale, valid)
            tensors += _parts(record)
        return [*routes, valid, *tensors]

    def _from_pool(self, shape: SiteShape, slots: Tensor, valid: Tensor) -> SiteRecord:
        packed, scales = self.pool.stored(shape.site.layer, shape.site.kind, slots)
        plan = self.plan
        bits, scale_bits = (4, 8) if plan is None else (plan.bits, plan.scale_bits)
        return SiteRecord.pack(shape, e2m1.unpack(packed), scales, None, bits, scale_bits, valid)

    def _pack(
        self, shape: SiteShape, planes: Tensor, scales: Tensor, global_scale: Tensor | None, valid: Tensor
    ) -> SiteRecord:
        scale_bits = 8 if self.plan is None else self.plan.scale_bits
        checks = None if scale_bits == 8 else scale_checks(scales.flatten(1), valid)
        return SiteRecord(shape, planes, pack_scales(scales, scale_bits), global_scale, checks, scale_bits)

    def _finish(self, sequence: Sequence, tensors: list[Tensor], weight_version: int) -> Harvested:
        """Build, encode and store the record of one sequence from its host tensors."""
        parts = iter(tensors)
        routes = None if self.capture.routes is None else next(parts).clone()
        if not self._ships(sequence) or self.plan is None or self.store is None:
            return Harvested(routes, None, 0)
        valid = next(parts)
        congruent = self.plan.scale_bits != 8
        sites = {
            shape.site: SiteRecord(
                shape,
                planes=next(parts),
                scales=next(parts),
                global_scale=next(parts) if shape.token_scale else None,
                checks=next(parts) if congruent else None,
                scale_bits=self.plan.scale_bits,
            )
            for shape in self.capture.shapes
        }
        record = Record(
            plan=str(self.plan),
            token_hash=token_hash(sequence.tokens),
            numerics_hash=self.numerics_hash,
            weight_version=weight_version,
            rows=sequence.length - 1,
            valid=valid,
            sites=sites,
        )
        key = make_key(sequence.request.id, sequence.sample, sequence.arrival, f"v{weight_version}")
        return Harvested(routes, self.store.put(key, encode(record)), int((~valid).sum()))


def _parts(record: SiteRecord) -> list[Tensor]:
    return [t for t in (record.planes, record.scales, record.global_scale, record.checks) if t is not None]


def _groups(sequences: Items[Sequence]) -> Iterable[list[Sequence]]:
    """Cut into groups of at most :data:`ROWS_AT_ONCE` rows, or of one sequence."""
    group: list[Sequence] = []
    rows = 0
    for sequence in sequences:
        if group and rows + sequence.length > ROWS_AT_ONCE:
            yield group
            group, rows = [], 0
        group.append(sequence)
        rows += sequence.length
    if group:
        yield group


def to_host(tensors: Items[Tensor]) -> list[Tensor]:
    """Copy tensors to the host, those of one dtype in one transfer; order and shapes are kept."""
    if all(t.device.type == "cpu" for t in tensors):
        return [t.clone(memory_format=torch.contiguous_format) for t in tensors]
    arrived: list[Tensor | None] = [None] * len(tensors)
    for dtype in {t.dtype for t in tensors}:
        members = [i for i, t in enumerate(tensors) if t.dtype is dtype]
        flat = torch.cat([tensors[i].reshape(-1) for i in members]).cpu()
        for i, part in zip(members, flat.split([tensors[i].numel() for i in members]), strict=True):
            arrived[i] = part.view(tensors[i].shape)
    return [t for t in arrived if t is not None]
