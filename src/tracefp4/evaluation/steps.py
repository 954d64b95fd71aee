"""Decode steps of one engine that differ in what is recorded and in the format of the KV cache.

An engine is expensive to build: its model is made and packed, its layers are compiled. None of that depends on a plan.
A plan only needs another record, a KV format another pool, and each of them, on a GPU, a captured graph of its own. So
the engine is built once, and its site objects are given another record or pool while a step is captured or run.

Tokens are random and all different, so that a step hits as many experts as one of a run, and pools are filled with
ordinary numbers (:mod:`tracefp4.evaluation.fill`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.errors import EngineError
from tracefp4.evaluation.bench import wait_for
from tracefp4.evaluation.fill import distinct_tokens, fill_pool
from tracefp4.guidance.codec import CHUNK, chunks
from tracefp4.guidance.frame import pending_rows
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.ring import Ring, parcel_bytes
from tracefp4.guidance.sheaf import Sheaf
from tracefp4.guidance.workers import side_by_side
from tracefp4.rollout.admission import recorded_shapes
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.embedded import EmbeddedEngine
from tracefp4.rollout.graphs import DecodeGraphs
from tracefp4.rollout.harvest import ROWS_AT_ONCE, gather
from tracefp4.rollout.inputs import DecodeRow
from tracefp4.rollout.pool import KVPool
from tracefp4.rollout.request import Sequence as Generated

NAMELESS = "0" * 32
"""Stands for the hash of tokens that nobody sampled."""


def decode_rows(engine: EmbeddedEngine, batch: int, context: int) -> list[DecodeRow]:
    """Rows of ``batch`` sequences of ``context`` tokens, each with pages, a state row and a token of its own."""
    width, tokens = engine.pages.pages_for(context), distinct_tokens(batch, engine._vocabulary)
    sampling = SamplingParams(max_new_tokens=1, seed=0)
    rows = []
    for i in range(batch):
        sequence = Generated(Request(str(i), (1,), 1, sampling), 0, i, i, False)
        sequence.ticket = 1
        sequence.state_row = i if engine.states.needed else None
        rows.append(DecodeRow(tokens[i], context - 1, list(range(i * width, (i + 1) * width)), sequence))
    return rows


@dataclass(slots=True)
class Step:
    """A decode step of an engine under one plan and one KV format."""

    engine: EmbeddedEngine
    rows: list[DecodeRow]
    width: int
    """Pages of the block tables."""
    capture: Capture
    pool: KVPool
    graphs: DecodeGraphs | None

    @contextmanager
    def _serving(self) -> Iterator[None]:
        sites = self.engine._runner.sites
        own = sites.pool, sites.capture
        sites.serve(self.pool, self.capture, sites.states)
        try:
            yield
        finally:
            sites.serve(*own, sites.states)

    def _launch(self) -> Callable[[], object]:
        """The step, ready to be repeated."""
        runner = self.engine._runner
        if self.graphs is None:
            inputs = runner.inputs.fill(self.rows, len(self.rows), self.width)
            return lambda: runner.decode_step(inputs, False)
        self.graphs.run(self.rows, self.width, False)
        return self.graphs.captured(len(self.rows), self.width, False).replay

    @contextmanager
    def ready(self) -> Iterator[Callable[[], object]]:
        """The step, to be launched as often as one likes: captured on a GPU, else as the engine runs it."""
        with torch.no_grad(), self._serving():
            yield self._launch()

    def seconds(self, repeats: int = 1) -> list[float]:
        """Seconds of ``repeats`` steps, after one that does not count."""
        with self.ready() as launch:
            if self.engine.device.type == "cuda":
                return device_seconds(launch, repeats)
            launch()
            return [_host_seconds(launch) for _ in range(repeats)]

    def hit_experts(self) -> float | None:
        """Experts of a layer that some sequence of the last step chose, mean over layers; ``None`` without experts."""
        routes, size = self.capture.routes, self.engine.pages.page_size
        if routes is None:
            return None
        slots = [row.pages[row.position // size] * size + row.position % size for row in self.rows]
        chosen = routes[torch.tensor(slots, device=routes.device)].cpu()
        return sum(len(layer.unique()) for layer in chosen.unbind(1)) / chosen.shape[1]


class Steps:
    """Steps of ``batch`` sequences, and what a step owes to the end of its sequences. Nothing may be in flight.

    Args:
        engine: warm, so that kernels are compiled and shapes of states known.
        batch: sequences of a step.
        context: tokens of each.

    Raises:
        EngineError: requests are in flight, or the pool has too few pages.
    """

    def __init__(self, engine: EmbeddedEngine, batch: int, context: int) -> None:
        if engine.busy:
            raise EngineError("a decode step can only be taken apart while no requests are in flight")
        pages = engine.pages.pages_for(context)
        if batch * pages > engine.pages.num_pages:
            raise EngineError(
                f"{batch} sequences of {context} tokens take {batch * pages} pages, the pool has "
                f"{engine.pages.num_pages}; at most {engine.pages.num_pages // pages} fit"
            )
        self.engine, self.batch, self.context = engine, batch, context
        self._rows, self._width = decode_rows(engine, batch, context), pages
        # Attention is cut as in an engine that was built for this batch, whatever room this one has.
        engine._runner.sites.max_batch = batch

    def own(self) -> Step:
        """The step as the engine runs it."""
        engine = self.engine
        return Step(engine, self._rows, self._width, engine.capture, engine.pool, engine._runner.graphs)

    def step(self, plan: Plan | None = None, *, dense: bool = False) -> Step:
        """The step with ``plan`` recorded, over the spec's KV cache or a ``dense`` one in the model's dtype."""
        engine, runner = self.engine, self.engine._runner
        pool = engine.pool
        if dense:
            spec = replace(engine.spec, name=f"{engine.spec.name}/dense-kv", kv=None)
            dtype = engine.model.get_input_embeddings().weight.dtype  # type: ignore[operator]
            pool = KVPool(engine.layout, spec, self._slots, dtype, engine.device)
            fill_pool(pool)
        graphs = runner.graphs
        if graphs is not None:
            experts = 0 if runner.sites.experts_by_kernel else engine.layout.num_experts
            graphs = DecodeGraphs(runner.decode_step, runner.inputs, experts, self.batch)
        if graphs is not None and not graphs.fits(self.batch):
            graphs = None
        return Step(engine, self._rows, self._width, self.record(plan), pool, graphs)

    def record(self, plan: Plan | None) -> Capture:
        """An empty record for ``plan``."""
        engine = self.engine
        shapes = recorded_shapes(engine.layout, engine.spec, plan)
        return Capture(engine.layout, shapes, 4 if plan is None else plan.bits, self._slots, engine.device)

    @property
    def _slots(self) -> int:
        return (self.engine.pages.num_pages + 1) * self.engine.pages.page_size

    def gathering(self, plan: Plan | None, repeats: int) -> float:
        """Seconds, for the rows that a step makes, of gathering what was recorded of them."""
        if plan is None:
            return 0.0
        work = partial(self._gather, self.record(plan), plan)
        return self._of_a_step(work, repeats)

    def framing(self, plan: Plan | None, repeats: int) -> float:
        """Seconds, for the rows that a step makes, of copying what was gathered to the host and writing frames."""
        if plan is None:
            return 0.0
        sheaf = self._gather(self.record(plan), plan)
        rows, starts = self.context, range(0, self._gathered, chunks(self.context) * CHUNK)
        about = {"token_hash": NAMELESS, "numerics_hash": self.engine.spec.hash, "weight_version": 0}
        ring = Ring(parcel_bytes(sheaf.tensors), self.engine.device)

        def work() -> None:
            there = sheaf.sent(ring.send(sheaf.tensors))
            side_by_side([pending_rows(there, start, rows, **about).take for start in starts])

        return self._of_a_step(work, repeats)

    @property
    def _sequences(self) -> int:
        """Sequences that are gathered at once."""
        return max(1, min(self.batch, ROWS_AT_ONCE // (chunks(self.context) * CHUNK)))

    @property
    def _gathered(self) -> int:
        return self._sequences * chunks(self.context) * CHUNK

    @torch.no_grad()
    def _gather(self, capture: Capture, plan: Plan) -> Sheaf:
        slots = torch.arange(self._gathered, device=self.engine.device) % self._slots
        return gather(capture, self.engine.pool, slots, torch.zeros_like(slots, dtype=torch.int32), plan)

    def _of_a_step(self, work: Callable[[], object], repeats: int) -> float:
        work()
        wait_for(self.engine.device)
        seconds = median(_host_seconds(lambda: (work(), wait_for(self.engine.device))) for _ in range(repeats))
        return seconds * self.batch / (self._sequences * self.context)


def in_turn(steps: Sequence[Step], repeats: int, rounds: int = 5) -> list[list[float]]:
    """Seconds of each step by round, median of ``repeats`` replays; steps take turns."""
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, seconds in zip(steps, found, strict=True):
            seconds.append(median(step.seconds(repeats)))
    return found


def more(with_it: Sequence[float], without: Sequence[float]) -> float:
    """Median of the differences, round by round."""
    return median(a - b for a, b in zip(with_it, without, strict=True))


def device_seconds(launch: Callable[[], object], repeats: int) -> list[float]:
    """Seconds on the device's clock of ``repeats`` launches, after one that does not count."""
    found = []
    for index in range(repeats + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        stop.record()
        torch.cuda.synchronize()
        if index:
            found.append(start.elapsed_time(stop) / 1e3)
    return found


def _host_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
