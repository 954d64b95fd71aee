"""The loop of an engine, watched while it samples.

A rollout has one total, and it may have been spent by the host or by the device. A few readings of the clock in each
decode step tell them apart and cost next to nothing: when the step is launched, and how long the host then waits for
the tokens of the step before. On a GPU::

    between     from one launch to the next: what a step takes
    host        the same without waiting: scheduling, filling buffers, launching, taking tokens
    device      the step's graph, replayed alone

A loop that the device holds up has ``between`` near ``device``; one that the host holds up waits for nothing, and has
``between`` near ``host``. Everything else is prefill, until first tokens are on the host, and the *rest*: queueing
requests, and after the last step gathering what was recorded and making rollouts. On a CPU a step computes where it is
launched, so all of it counts as the host's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tracefp4.rollout.embedded import EmbeddedEngine
from tracefp4.rollout.harvest import Harvested
from tracefp4.rollout.request import Sampled, Sequence
from tracefp4.rollout.runner import Flight


@dataclass(frozen=True, slots=True)
class _Launch:
    """Where the clocks stood when a step was launched, in seconds."""

    at: float
    waited: float
    prefill: float


@dataclass(slots=True)
class Watch:
    """What was seen; times in seconds."""

    launches: list[_Launch] = field(default_factory=list)
    """Of decode steps."""
    prefill: float = 0.0
    """Prefills, until the first tokens were known."""
    waited: float = 0.0
    """The host, for results of decode steps."""
    gathered: float = 0.0
    """Taking what was recorded of sequences that ended: launching it, and handing out what has arrived; in the end also
    waiting for the last copies."""
    landed: float = 0.0
    """When the last result had arrived, on the clock of the launches."""

    @property
    def decode(self) -> float:
        """From the first launch to the last result, without prefills in between."""
        if not self.launches:
            return 0.0
        first = self.launches[0]
        return self.landed - first.at - (self.prefill - first.prefill)

    def numbers(self, seconds: float) -> dict[str, float]:
        """Where the ``seconds`` of a rollout went.

        Returns:
            ``total_ms``, which is the sum of ``prefill_ms``, ``decode_ms`` and ``rest_ms``; ``gather_ms``, within the
            last two; ``steps``, those of decode; with two or more of them ``between_launches_us`` and
            ``between_launches_p95_us``, median and 95th percentile of the time between two launches without a prefill,
            and ``host_us``, the median of it without waiting.
        """
        found = {
            "total_ms": 1e3 * seconds,
            "prefill_ms": 1e3 * self.prefill,
            "decode_ms": 1e3 * self.decode,
            "rest_ms": 1e3 * (seconds - self.prefill - self.decode),
            "gather_ms": 1e3 * self.gathered,
            "steps": len(self.launches),
        }
        pairs = [(a, b) for a, b in pairwise(self.launches) if a.prefill == b.prefill]
        if pairs:
            between = np.array([b.at - a.at for a, b in pairs])
            host = between - [b.waited - a.waited for a, b in pairs]
            found["between_launches_us"] = 1e6 * float(np.median(between))
            found["between_launches_p95_us"] = 1e6 * float(np.quantile(between, 0.95))
            found["host_us"] = 1e6 * float(np.median(host))
        return found


@dataclass(slots=True)
class _WatchedFlight(Flight):
    """A decode step on its way that tells how long it was waited for."""

    watch: Watch

    def land(self) -> Sampled:
        start = time.perf_counter()
        if self.arrival is not None:
            self.arrival.synchronize()
            self.arrival = None
        self.watch.waited += time.perf_counter() - start
        sampled = Flight.land(self)
        self.watch.landed = time.perf_counter()
        return sampled


@contextmanager
def watched(engine: EmbeddedEngine) -> Iterator[Watch]:
    """Watch what ``engine`` does meanwhile. Nothing may be in flight at either end."""
    watch, loop, runner, harvester = Watch(), engine._loop, engine._runner, engine._harvester
    begin, launch, gather, take = loop.begin, runner.launch, harvester.gather, harvester.take

    def timed_begin() -> None:
        start = time.perf_counter()
        begin()
        watch.prefill += time.perf_counter() - start

    def timed_launch(sequences: Items[Sequence], before: Flight | None = None) -> Flight:
        watch.launches.append(_Launch(time.perf_counter(), watch.waited, watch.prefill))
        made = launch(sequences, before)
        return _WatchedFlight(made.sequences, made.tokens, made.truncate, made.top, made.rows, made.arrival, watch)

    def timed_gather(sequences: Items[Sequence], weight_version: int) -> None:
        start = time.perf_counter()
        gather(sequences, weight_version)
        watch.gathered += time.perf_counter() - start

    def timed_take(*, wait: bool) -> list[tuple[Sequence, Harvested]]:
        start = time.perf_counter()
        found = take(wait=wait)
        watch.gathered += time.perf_counter() - start
        return found

    loop.begin, runner.launch, harvester.gather, harvester.take = timed_begin, timed_launch, timed_gather, timed_take
    try:
        yield watch
    finally:
        del loop.begin, runner.launch, harvester.gather, harvester.take  # the classes' own again
