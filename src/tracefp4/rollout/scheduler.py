"""Who runs next.

Three places, and the way through them::

    waiting  --admit-->  resident  --start-->  running  --finish-->  gone
       ^                 (prefixes)           (sequences)
       +------------------- retract --------------+

*Waiting* prefixes own nothing. Admission is first come, first served: the oldest gets its pages or nobody does. While
others run it waits until an eighth of the batch is free: a prefill is hundreds of launches whatever its size, and the
decode step in flight has to land before it, so a few large ones cost far less than one after each sequence that ends. A
*resident* prefix owns pages and is prefilled, up to ``prefill_chunk`` tokens a step together with the others. Once it
is complete its members *start*, as far as the batch has room. *Running* sequences decode one token a step each.

Pages are handed out as sequences grow, not in advance. When none is left the *youngest* owner, sequence or prefix, is
retracted: it gives everything back and waits again in its old place of the queue. The oldest owner therefore always
gets on, and because a request is refused when it could not run alone, everything ends.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from dataclasses import dataclass

from tracefp4.rollout.pool import PageAllocator
from tracefp4.rollout.request import Prefix, Sequence
from tracefp4.rollout.state import StatePool

ADMITTED_SHARE = 8
"""One of how many places of the batch must be free before anybody is admitted while others run, if so many wait."""
RESIDENT_STATES = 8
"""Prefixes of a hybrid model that may be resident at once: each holds a row of linear-attention state, which is
large."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start..stop-1`` of a prefix, forwarded in one step."""

    prefix: Prefix
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Start:
    """A member that leaves its prefix, and what has to be copied for it."""

    prefix: Prefix
    sequence: Sequence
    page: tuple[int, int] | None
    """``(from, to)``: the partly filled last page."""
    row: tuple[int, int] | None
    """``(from, to)``: the linear-attention state."""
    inherits: bool = False
    """The last member takes over what the prefix owns and copies nothing."""


class Scheduler:
    """The queue and everything that owns pages.

    Args:
        pages: the page allocator of the KV pool.
        states: rows of linear-attention state.
        max_batch: sequences that decode at once.
        prefill_chunk: prompt tokens a step.
    """

    def __init__(self, pages: PageAllocator, states: StatePool, max_batch: int, prefill_chunk: int) -> None:
        self.pages, self.states = pages, states
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.max_resident = RESIDENT_STATES if states.needed else max_batch
        self.waiting: list[Prefix] = []
        self.resident: list[Prefix] = []
        self.running: list[Sequence] = []
        """Oldest first."""
        self.retractions = 0
        self._tickets = itertools.count(1)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.resident or self.running)

    @property
    def has_prefill(self) -> bool:
        """Whether a prefix has tokens to forward or members that may start, or some are to be admitted."""
        room = len(self.running) < self.max_batch
        return any(room or not prefix.complete for prefix in self.resident) or self._has_places()

    def request_ids(self) -> set[str]:
        """Ids of all requests in flight."""
        prefixes = (p.members[0].request.id for p in (*self.waiting, *self.resident))
        return {*prefixes, *(s.request.id for s in self.running)}

    def add(self, members: list[Sequence]) -> None:
        """Queue the samples of one request."""
        self._queue(Prefix(members[0].tokens, deque(members)))

    # -- One step, in this order

    def prefill(self) -> list[Chunk]:
        """Admit what fits, then deal the step's tokens out to resident prefixes, oldest first."""
        self._admit()
        chunks, budget = [], self.prefill_chunk
        for prefix in self.resident:
            length = min(budget, len(prefix.tokens) - prefix.done)
            if length > 0:
                chunks.append(Chunk(prefix, prefix.done, prefix.done + length))
                budget -= length
        return chunks

    def start(self) -> list[Start]:
        """Let members of complete prefixes start while the batch has room and the pool a page for them."""
        starts = []
        for prefix in [p for p in self.resident if p.complete]:
            while prefix.members and len(self.running) < self.max_batch:
                if not self._make_room(prefix):
                    return starts
                starts.append(self._start(prefix))
        return starts

    def decode(self, ahead: int = 0) -> list[Sequence]:
        """Give every running sequence a slot for its newest token; return those that decode, oldest first.

        Args:
            ahead: tokens of each that are sampled but not known yet. Whoever ends with them, whatever they are, is left
                out.
        """
        ready: list[Sequence] = []
        size = self.pages.page_size
        for sequence in self.running.copy():  # whoever gives way meanwhile is younger
            new = len(sequence.response) + ahead
            if ahead and new >= sequence.most:
                continue
            while sequence.pages and len(sequence.pages) * size < sequence.prompt + new:
                if self.pages.free:
                    sequence.pages += self.pages.allocate(1)
                else:
                    self._retract_youngest()
            if sequence.pages:
                ready.append(sequence)
        return ready

    def leave(self, sequence: Sequence) -> None:
        """A running sequence ended. Its rows are still to be read, so it keeps its pages until :meth:`finish`."""
        self.running.remove(sequence)
        if sequence.state_row is not None:
            self.states.release(sequence.state_row)
            sequence.state_row = None

    def finish(self, sequence: Sequence) -> None:
        """Take back the pages of a sequence that left."""
        self._release(sequence)

    def abort(self, request_id: str) -> list[Sequence]:
        """Drop a request wherever it is; return its unfinished sequences, in order of samples."""
        dropped = [s for s in self.running if s.request.id == request_id]
        for sequence in dropped:
            self.leave(sequence)
            self.finish(sequence)
        for queue in (self.resident, self.waiting):
            for prefix in [p for p in queue if p.members[0].request.id == request_id]:
                queue.remove(prefix)
                self._release(prefix)
                dropped += prefix.members
        return sorted(dropped, key=lambda s: s.sample)

    # -- Parts

    def _queue(self, prefix: Prefix) -> None:
        insort(self.waiting, prefix, key=lambda p: p.key)

    def _has_places(self) -> bool:
        """Whether enough places of the batch are free to admit somebody."""
        if not self.waiting or not (self.running or self.resident):
            return bool(self.waiting)
        free = self.max_batch - len(self.running) - sum(len(p.members) for p in self.resident)
        share = max(1, self.max_batch // ADMITTED_SHARE)
        # No more need be free than those who wait would take.
        return free >= share or free >= sum(len(p.members) for p in self.waiting[:share])

    def _admit(self) -> None:
        if not self._has_places():
            return
        while self.waiting and len(self.resident) < self.max_resident:
            prefix = self.waiting[0]
            if len(self.running) + sum(len(p.members) for p in self.resident) >= self.max_batch:
                return
            if self.states.needed and not self.states.free:
                return
            # Running sequences will want a page each before long; taking the last ones would only retract somebody.
            spare = len(self.running) if self.running or self.resident else 0
            needed = self.pages.pages_for(len(prefix.tokens))
            if self.pages.free < needed + spare:
                return
            self.waiting.pop(0)
            prefix.pages = self.pages.allocate(needed)
            prefix.state_row = self.states.allocate() if self.states.needed else None
            prefix.ticket = next(self._tickets)
            insort(self.resident, prefix, key=lambda p: p.key)

    def _make_room(self, prefix: Prefix) -> bool:
        """Whether the next member can have its copy of the last page."""
        if len(prefix.members) == 1 or not len(prefix.tokens) % self.pages.page_size:
            return True
        while not self.pages.free and not self.running and self.resident[-1] is not prefix:
            self._retract_youngest()
        return self.pages.free > 0

    def _start(self, prefix: Prefix) -> Start:
        sequence = prefix.members.popleft()
        sequence.ticket = next(self._tickets)
        sequence.prefix_ticket, sequence.prefix_length = prefix.ticket, len(prefix.tokens)
        insort(self.running, sequence, key=lambda s: s.key)
        if not prefix.members:
            # The last one inherits instead of copying.
            self.resident.remove(prefix)
            sequence.pages, sequence.state_row = prefix.pages, prefix.state_row
            return Start(prefix, sequence, None, None, inherits=True)
        full = len(prefix.tokens) // self.pages.page_size
        shared, rest = prefix.pages[:full], prefix.pages[full:]
        self.pages.share(shared)
        own = self.pages.allocate(len(rest))
        sequence.pages = shared + own
        row = None
        if prefix.state_row is not None:
            sequence.state_row = self.states.allocate()
            row = (prefix.state_row, sequence.state_row)
        return Start(prefix, sequence, (rest[0], own[0]) if rest else None, row)

    def _retract_youngest(self) -> None:
        owners: list[Prefix | Sequence] = [*self.running, *self.resident]
        victim = max(owners, key=lambda owner: owner.key)
        self._release(victim)
        self.retractions += 1
        if isinstance(victim, Sequence):
            self.running.remove(victim)
            self._queue(Prefix(victim.tokens, deque([victim])))
        else:
            self.resident.remove(victim)
            victim.done, victim.hidden = 0, None
            self._queue(victim)

    def _release(self, owner: Prefix | Sequence) -> None:
        self.pages.release(owner.pages)
        owner.pages = []
        if owner.state_row is not None:
            self.states.release(owner.state_row)
            owner.state_row = None
