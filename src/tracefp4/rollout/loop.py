"""From queued requests to sequences that have ended: prefill, first tokens, decode steps.

On a GPU a decode step is launched before the one in front of it has told its tokens, so that the host schedules,
decides who ended and gathers while the GPU works. Who ends with a token that nobody knew yet is in the next step
already; that row is dropped. When somebody is to be prefilled, or pages become few, the step in flight lands first.

A sequence that has ended keeps its pages until its rows are gathered (:mod:`tracefp4.rollout.harvest`). Gathering a row
costs little and beginning to gather much, so sequences that end within a few steps of each other are gathered
together, unless somebody waits for their pages.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import compress, repeat

from tracefp4.errors import NonFiniteError
from tracefp4.rollout.engine import EngineStats
from tracefp4.rollout.request import Sampled, Sequence, StopRules
from tracefp4.rollout.runner import Flight, Runner
from tracefp4.rollout.scheduler import Scheduler

HOLD_STEPS = 16
"""Steps after which a sequence that ended is gathered at the latest."""


class Loop:
    """Runs what the scheduler decides and collects who ended.

    Args:
        scheduler: the queue and the owners of pages.
        runner: forwards and samples.
        stops: when a sequence ends.
        stats: counted into.
        overlap: launch a decode step before the result of the last one is known.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, stops: StopRules, stats: EngineStats, overlap: bool
    ) -> None:
        self._scheduler, self._runner, self._stops, self._stats = scheduler, runner, stops, stats
        self._overlap = overlap
        self._flight: Flight | None = None
        """The decode step whose tokens are not known yet."""
        self._ended: list[Sequence] = []
        """Sequences that are done and were not taken yet; they still own their pages."""
        self._due_at = 0
        """Step at which they are to be taken at the latest."""

    @property
    def busy(self) -> bool:
        """Whether anything is left to do or to take."""
        return self._scheduler.busy or bool(self._ended)

    @property
    def request_ids(self) -> set[str]:
        """Ids of requests of which something is left to do or to take."""
        return self._scheduler.request_ids() | {sequence.request.id for sequence in self._ended}

    @property
    def waited_for(self) -> bool:
        """Whether somebody is to be prefilled now, who may need the pages of those that ended."""
        return self._scheduler.has_prefill

    @property
    def due(self) -> bool:
        """Whether sequences that ended are to be taken now, and not together with those that end next."""
        scheduler = self._scheduler
        return bool(self._ended) and (
            self._stats.steps >= self._due_at
            or self.waited_for
            or scheduler.pages.free < 2 * len(scheduler.running)
            or not scheduler.running
        )

    def begin(self) -> None:
        """Prefill, and let members of finished prompts sample their first token. Nothing may be in flight."""
        chunks = self._scheduler.prefill()
        if chunks:
            self._runner.prefill(chunks)
            self._stats.prefill_tokens += sum(chunk.stop - chunk.start for chunk in chunks)
        starts = self._scheduler.start()
        if starts:
            self._runner.copy(starts)
            self._stats.shared_tokens += sum(len(s.prefix.tokens) for s in starts if not s.inherits)
            self._take([s.sequence for s in starts], self._runner.sample_first(starts))

    def decode(self) -> None:
        """Launch a decode step, and take the tokens of the one before."""
        # Nobody is retracted whose token is in flight.
        if self._scheduler.pages.free < len(self._scheduler.running):
            self.land()
        running = self._scheduler.decode(0 if self._flight is None else 1)
        flight = self._runner.launch(running, self._flight) if running else None
        self.land()
        self._flight = flight
        if not self._overlap:
            self.land()

    def land(self) -> None:
        """Take the tokens of the step in flight, if there is one; rows of sequences that are gone are dropped.

        Raises:
            NonFiniteError: logits are NaN.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return
        live = [s.finish is None and bool(s.pages) for s in flight.sequences]
        self._stats.decode_tokens += sum(live)
        self._take(flight.sequences, flight.land(), live)

    def _take(self, sequences: Items[Sequence], sampled: Sampled, live: Items[bool] | None = None) -> None:
        """Append sampled tokens, and let those sequences leave that end with them; all, or those that are ``live``."""
        tops = repeat(None) if sampled.top is None else sampled.top
        reason = self._stops.reason
        new = zip(sequences, sampled.tokens, sampled.logprobs, tops, strict=sampled.top is not None)
        for sequence, token, logprob, top in new if live is None else compress(new, live):
            if logprob != logprob:
                raise NonFiniteError(f"request {sequence.request.id!r}, token {sequence.length}: the logits are NaN")
            sequence.append(token, logprob, top)
            finish = reason(sequence)
            if finish is not None:
                sequence.finish = finish
                if not self._ended:
                    self._due_at = self._stats.steps + HOLD_STEPS
                self._scheduler.leave(sequence)
                self._ended.append(sequence)

    def take(self) -> list[Sequence]:
        """Hand over the sequences that ended; whoever takes them gives their pages back."""
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_id: str) -> list[Sequence]:
        """Drop a request wherever it is; return its sequences that were not taken yet, in order of samples."""
        dropped = self._scheduler.abort(request_id)
        for sequence in [s for s in self._ended if s.request.id == request_id]:
            self._ended.remove(sequence)
            self._scheduler.finish(sequence)
            dropped.append(sequence)
        return sorted(dropped, key=lambda s: s.sample)

    def clear(self) -> None:
        """Drop everything."""
        self._flight = None
        for request_id in self._scheduler.request_ids():
            self._scheduler.abort(request_id)
        for sequence in self.take():
            self._scheduler.finish(sequence)
