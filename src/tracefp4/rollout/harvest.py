"""From finished sequences to guidance in the store.

When a sequence ends, its rows are gathered by slot before the slots are given away: expert sites from the record, K, V
and latents from the pool itself. All sequences that end in one step are gathered together, cut to the plan's bits and
summed up on the device, and cross to the host as one parcel (:mod:`tracefp4.guidance.ring`), with their routes and with
what is valid. The host does not wait for it: a GPU gathers after the decode step that runs already, and sequences are
handed out when somebody asks and their parcel has arrived. Each becomes a frame when the store takes it, which may be
late, or never (:mod:`tracefp4.guidance.late_store`). Sites of a run are handled as one tensor, so the number of
operations does not grow with the number of layers.

Sequences stand one after the other, each padded to whole chunks of the scale checks, so that the checks of all of them
are computed at once. A rollout of ``N`` tokens has ``N - 1`` rows: the last sampled token was never forwarded.
"""

from __future__ import annotations

from collections import deque
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
from tracefp4.guidance.ring import Parcel, Ring, parcel_bytes
from tracefp4.guidance.sheaf import Sheaf
from tracefp4.guidance.store import Pending, Store, make_key
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.pool import KVPool, PageAllocator, StoredKV
from tracefp4.rollout.request import Sequence
from tracefp4.rollout.upload import upload

ROWS_AT_ONCE = 32768
"""Rows gathered at once. Twice as many, at most, wait on the device for their copies: this bounds the memory of a step
in which many long sequences end."""

RING_BYTES = 1 << 32
"""Most memory of the ring through which rows leave. It is no larger than the rows of a full pool, and without a plan no
larger than the routes that may wait at once."""

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


@dataclass(slots=True, eq=False)
class _Member:
    """A sequence that was gathered."""

    sequence: Sequence
    start: int
    """Its first row among those that were gathered together."""
    frame: tuple[str, Pending] | None = None
    """Key and frame, if its guidance is shipped."""

    @property
    def rows(self) -> slice:
        """Its rows among those that were gathered together."""
        return slice(self.start, self.start + self.sequence.length - 1)


@dataclass(slots=True)
class _Flight:
    """Sequences that were gathered together and were not handed out yet."""

    members: list[_Member]
    parcel: Parcel
    """The tensors of a sheaf, if guidance is shipped, and after them routes ``(R, moe_layers, top_k)``, if there are
    any."""
    rows: int
    """``R``."""


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
        chunk, rows = _chunk_bytes(capture, plan), pages.num_pages * pages.page_size
        if plan is None:  # then nothing keeps its place once it is handed out
            rows = min(rows, 2 * ROWS_AT_ONCE)
        self.ring = Ring(min(RING_BYTES, chunks(rows) * chunk), device)
        self._most_rows = min(ROWS_AT_ONCE, self.ring.nbytes // max(chunk, 1) * CHUNK)
        self._flights: deque[_Flight] = deque()
        """Oldest first, which is the order in which they arrive."""

    @property
    def busy(self) -> bool:
        """Whether anything was gathered and not handed out."""
        return any(flight.members for flight in self._flights)

    @property
    def request_ids(self) -> set[str]:
        """Ids of requests of which something was gathered and not handed out."""
        return {member.sequence.request.id for flight in self._flights for member in flight.members}

    def gather(self, sequences: Items[Sequence], weight_version: int) -> None:
        """Gather the rows of ``sequences``, which still own their pages and need them no more when this returns."""
        for some in _split(sequences, self._most_rows):
            members, slots, expected = self._places(some)
            self._wait_for_memory(len(slots))
            tensors: list[Tensor] = []
            sheaf = None
            if some[0].guidance and self.plan is not None and self.store is not None:
                sheaf = gather(self.capture, self.pool, slots, expected, self.plan)
                tensors += sheaf.tensors
            if self.capture.routes is not None:
                tensors.append(self.capture.routes.index_select(0, slots))
            parcel = self.ring.send(tensors)
            self._flights.append(_Flight(members, parcel, len(slots)))
            if sheaf is not None:
                self._frame(members, sheaf.sent(parcel), weight_version)

    def take(self, *, wait: bool) -> list[tuple[Sequence, Harvested]]:
        """Hand out what has arrived, or everything, for which the host may have to ``wait``. Frames go to the store."""
        found: list[tuple[Sequence, Harvested]] = []
        while self._flights and (wait or self._flights[0].parcel.arrived):
            found += self._unpack(self._flights.popleft())
        return found

    def drop(self, request_id: str) -> list[Sequence]:
        """Give up on a request; its sequences that were not handed out."""
        dropped = []
        for flight in self._flights:
            for member in [m for m in flight.members if m.sequence.request.id == request_id]:
                flight.members.remove(member)
                dropped.append(member.sequence)
                if member.frame is not None:
                    member.frame[1].drop()
        return dropped

    def clear(self) -> None:
        """Give up on everything."""
        for request_id in self.request_ids:
            self.drop(request_id)
        self._flights.clear()

    def _places(self, sequences: list[Sequence]) -> tuple[list[_Member], Tensor, Tensor]:
        """Where sequences stand among ``R`` rows; slots ``(R,)`` int64 of rows, and tickets that they must carry.

        Tickets are ``(R,)`` int32, 0 for padding, which no writer has.
        """
        members, end = [], 0
        for sequence in sequences:
            members.append(_Member(sequence, end))
            end += _padded(sequence)
        page = self.pages.page_size
        slots = np.full(end, self.pages.padding_page * page, np.int64)
        expected = np.zeros(end, np.int32)
        for member in members:
            sequence, start = member.sequence, member.start
            rows, prefix = sequence.length - 1, sequence.prefix_length
            own = np.array(sequence.pages)[:, None] * page + np.arange(page)
            slots[start : start + rows] = own.ravel()[:rows]
            expected[start : start + prefix] = sequence.prefix_ticket
            expected[start + prefix : start + rows] = sequence.ticket
        return members, upload(slots, self.device), upload(expected, self.device)

    def _wait_for_memory(self, rows: int) -> None:
        """Until no more rows wait on the device than may."""
        waiting = [flight for flight in self._flights if not flight.parcel.arrived]
        while waiting and sum(flight.rows for flight in waiting) + rows > 2 * ROWS_AT_ONCE:
            waiting.pop(0).parcel.open()

    def _frame(self, members: list[_Member], sheaf: Sheaf, weight_version: int) -> None:
        """Give members frames of a sheaf that may not have arrived."""
        for member in members:
            sequence = member.sequence
            frame = pending_rows(
                sheaf,
                member.start,
                sequence.length - 1,
                token_hash=token_hash(sequence.tokens),
                numerics_hash=self.numerics_hash,
                weight_version=weight_version,
            )
            key = make_key(sequence.request.id, sequence.sample, sequence.arrival, f"v{weight_version}")
            member.frame = key, frame

    def _unpack(self, flight: _Flight) -> list[tuple[Sequence, Harvested]]:
        """What became of the members of a flight, whose frames the store takes."""
        tensors, members = flight.parcel.open(), flight.members
        frames = [member.frame for member in members if member.frame is not None]
        handles: Items[Handle | None] = [None] * len(members)
        missing, routes = [0] * len(members), [None] * len(members)
        if frames and self.store is not None:
            handles, valid = self.store.keep_all(frames), tensors[1].numpy()
            missing = [int(np.count_nonzero(~valid[member.rows])) for member in members]
        if self.capture.routes is not None:
            # Copies: a rollout must not keep the rows of its neighbours alive.
            routes = [tensors[-1][member.rows].clone() for member in members]
        found = zip(routes, handles, missing, strict=True)
        return [(member.sequence, Harvested(*row)) for member, row in zip(members, found, strict=True)]


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


def _chunk_bytes(capture: Capture, plan: Plan | None) -> int:
    """Bytes of the parcel of 16 rows; ``n`` times as many rows take at most ``n`` times as many."""
    tensors: list[Tensor] = []
    if plan is not None:
        tensors += Sheaf.new(plan, capture.table, torch.empty(CHUNK, dtype=torch.bool)).tensors
    if capture.routes is not None:
        tensors.append(capture.routes[:1].expand(CHUNK, -1, -1))
    return parcel_bytes(tensors)


def _padded(sequence: Sequence) -> int:
    """Rows of a sequence, filled up to whole chunks."""
    return chunks(sequence.length - 1) * CHUNK


def _split(sequences: Items[Sequence], most: int) -> Iterable[list[Sequence]]:
    """Cut into groups of at most ``most`` rows, or of one sequence, that all ship guidance or none does."""
    group: list[Sequence] = []
    rows = 0
    for sequence in sequences:
        if group and (rows + _padded(sequence) > most or group[0].guidance != sequence.guidance):
            yield group
            group, rows = [], 0
        group.append(sequence)
        rows += _padded(sequence)
    if group:
        yield group
