"""Benchmarks of the embedded engine: the decode step and prefill.

The model has the shape of a large one (:mod:`tracefp4.evaluation.bench_shapes`) with random weights and fewer layers.
A decode step is timed as one CUDA graph over sequences of a fixed length: their pages hold whatever the pool was filled
with, which changes no instruction. The precision combinations are specs, each in an engine of its own, in one run.

Two ratios must not be confused. At a *fixed batch* both arms serve the same sequences, and FP4 can gain no more than
the bytes a value. *Memory-limited*, each arm serves as many sequences as a budget of bytes holds beside its weights,
and FP4 gains twice: smaller weights leave more room, and a token of K and V takes less of it. The budget is that of the
whole model; the slice serves the batch that the whole model could, with a smaller pool.

Head and sampler weigh more in a slice than in the whole model. They are timed on their own, and rows called *whole* say
what ``L`` layers would take if each took what a layer of the slice does::

    whole = tail + (slice - tail) L / layers of the slice
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.evaluation.bench import Bench, Row, failures
from tracefp4.evaluation.bench_peer import PEER, peer_step
from tracefp4.evaluation.bench_shapes import SHAPES, Shape, Sizes, random_model, sizes
from tracefp4.evaluation.steps import Steps, decode_rows
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.guidance.late_store import LateStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.store import Store
from tracefp4.rollout.embedded import EmbeddedEngine

SPECS = ("bf16", "nvfp4-w4a4", "nvfp4-kv4", "nvfp4-w4a4-kv4", "mxfp4-w4a4-kv4")
"""Precision combinations of a decode step; the first four are BF16 and NVFP4 experts by BF16 and NVFP4 KV cache."""
WEIGHTS_ALONE = ("nvfp4-w4a16", "nvfp4-w4a16-kv4", "mxfp4-w4a16", "mxfp4-w4a16-kv4")
"""The same with the activations of experts left in BF16."""
ARMS = (*SPECS, *WEIGHTS_ALONE, PEER)
"""Everything that a decode step is measured for. Those that are not in :data:`SPECS` have to be asked for; the peer
compiles for long."""
GIB = float(1 << 30)
PAGE = 16
"""Tokens of a page."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What is measured: some layers of a shape, at a length of context."""

    name: str
    layers: int
    context: int
    compiled: bool = False
    """Decoder layers and sampler compiled for decode steps."""
    state_dtype: str = "float32"
    """What recurrent states are kept in."""

    @property
    def shape(self) -> Shape:
        """The whole model's shape."""
        return SHAPES[self.name]

    def sizes(self, spec: Spec, layers: int | None = None) -> Sizes:
        """Bytes under ``spec``, of its own or of another number of layers."""
        return sizes(self.name, layers or self.layers, spec, self.state_dtype)

    @property
    def label(self) -> str:
        """Shape and layers."""
        return f"{self.name} {self.layers}/{self.shape.layers} layers" + self.suffix

    @property
    def whole(self) -> str:
        """The whole model, estimated from the slice."""
        return f"{self.name} whole" + self.suffix

    @property
    def suffix(self) -> str:
        """Compiled or not, and how states are kept if not in float32."""
        states = "" if self.state_dtype == "float32" else f" states {self.state_dtype}"
        return " compiled" * self.compiled + states

    @property
    def length(self) -> str:
        """Context in words."""
        return f"{self.context // 1024}K" if self.context >= 1024 else str(self.context)


def slice_of(
    name: str, layers: int | None, context: int, compiled: bool = False, state_dtype: str = "float32"
) -> Slice:  # fmt: skip
    """The slice of shape ``name``; ``layers`` ``None`` for its own number."""
    return Slice(name, layers or SHAPES[name].slice, context, compiled, state_dtype)


def bench_decode(
    bench: Bench,
    part: Slice,
    batches: tuple[int, ...] = (1, 16, 64),
    budget: float | None = None,
    arms: tuple[str, ...] = SPECS,
) -> None:
    """One decode step at fixed batch and at the batch that a budget holds, for each precision combination and peer.

    Args:
        bench: where rows go.
        part: what is measured.
        batches: the fixed ones.
        budget: GiB of the whole model's memory-limited rows; ``None`` for the shape's own, 0 for no such rows.
        arms: specs, and :data:`PEER`.
    """
    budget = part.shape.budget if budget is None else budget
    for arm in arms:
        if arm == PEER:
            for batch in batches:
                _peer(bench, part, batch)
        else:
            _steps(bench, part, arm, batches, budget)


def arm_of(spec: str, plan: str | None = None) -> str:
    """Name of an arm in the table."""
    return "bf16" if spec == "bf16" else f"fp4 {spec}" + ("" if plan is None else f" {plan}")


def make_engine(
    part: Slice,
    spec: str,
    plan: str | None,
    device: torch.device,
    tokens: int,
    batch: int,
    chunk: int = 4096,
    store: Store | None = None,
) -> EmbeddedEngine:
    """An engine with a random model, a pool for ``tokens`` tokens and room for ``batch`` sequences.

    Its frames wait in ``store``, or in one of its own of the kind that runs use, where they are written when claimed.
    """
    return EmbeddedEngine(
        random_model(part.shape.config(part.layers), device), None, get_spec(spec),
        None if plan is None else Plan.parse(plan), LateStore(MemoryStore()) if store is None else store,
        max_tokens=paged(tokens), page_size=PAGE, max_batch=batch, prefill_chunk=chunk,
        compile_decode=part.compiled, state_dtype=part.state_dtype,
    )  # fmt: skip


def paged(tokens: int) -> int:
    """Slots of the pages that hold ``tokens`` tokens."""
    return -(-tokens // PAGE) * PAGE


def release() -> None:
    """Free the memory of engines that are gone: their parts refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _steps(bench: Bench, part: Slice, spec: str, batches: tuple[int, ...], budget: float) -> None:
    arm, chosen = arm_of(spec), get_spec(spec)
    own, whole = part.sizes(chosen), part.sizes(chosen, part.shape.layers)
    limited = whole.fits(budget * GIB, part.context) if budget else 0
    most = max(*batches, limited)
    try:
        engine = make_engine(part, spec, None, bench.device, most * paged(part.context), most)
        warm(engine)
        _memory_rows(bench, part, arm, engine, own)
    except failures() as error:
        bench.fail(f"decode engine {part.label}", arm, error)
        release()
        return
    for batch in batches:
        _fixed(bench, part, arm, engine, own, whole, batch)
    if limited:
        _limited(bench, part, arm, engine, own, whole, limited, budget)
    elif budget:
        bench.fail(f"decode {part.label} memory-limited", arm, f"{budget} GiB do not hold one sequence")
    del engine
    release()


def _fixed(
    bench: Bench, part: Slice, arm: str, engine: EmbeddedEngine, own: Sizes, whole: Sizes, batch: int
) -> None:  # fmt: skip
    for label, seconds, size in _measured(bench, part, arm, engine, own, whole, batch, f"B{batch} {part.length}"):
        bound = 1e6 * size.step(batch, part.context) / bench.bandwidth
        detail = f"{batch / seconds:.0f} tok/s" + ("" if size is own else f", from {part.layers} layers")
        bench.keep(Row(label, arm, 1e6 * seconds, "us", bound, detail=detail))


def _limited(
    bench: Bench, part: Slice, arm: str, engine: EmbeddedEngine, own: Sizes, whole: Sizes, batch: int, budget: float
) -> None:  # fmt: skip
    name = f"memory-limited {part.length}"
    for label, seconds, size in _measured(bench, part, arm, engine, own, whole, batch, name):
        bound = batch * bench.bandwidth / size.step(batch, part.context)
        detail = f"B{batch} in {budget:g} GiB, {whole.weights / GIB:.1f} of them weights"
        bench.keep(Row(label, arm, batch / seconds, "tok/s", bound, detail=detail))


def _measured(
    bench: Bench, part: Slice, arm: str, engine: EmbeddedEngine, own: Sizes, whole: Sizes, batch: int, name: str
) -> list[tuple[str, float, Sizes]]:  # fmt: skip
    """Label, seconds of a step and sizes, of the slice and of the whole model; nothing if the step failed."""
    try:
        seconds, estimate = _both(bench, part, engine, batch)
    except failures() as error:
        bench.fail(f"decode {part.label} {name}", arm, error)
        return []
    return [(f"decode {part.label} {name}", seconds, own), (f"decode {part.whole} {name}", estimate, whole)]


def _memory_rows(bench: Bench, part: Slice, arm: str, engine: EmbeddedEngine, own: Sizes) -> None:
    """What the engine really keeps, beside what it has to."""
    bench.keep(Row(f"weights {part.label}", arm, engine.weight_bytes / GIB, "GiB", own.weights / GIB, detail="as kept"))
    bench.keep(Row(f"KV a token {part.label}", arm, float(engine.token_bytes), "B", own.token))


def _both(bench: Bench, part: Slice, engine: EmbeddedEngine, batch: int) -> tuple[float, float]:
    """Seconds of a step of the slice, and what the whole model would take."""
    seconds = step_seconds(engine, batch, part.context, bench.repeats)
    tail = tail_seconds(bench, engine, batch)
    return seconds, tail + max(seconds - tail, 0.0) * part.shape.layers / part.layers


def warm(engine: EmbeddedEngine) -> None:
    """Compile what a prefill and a step need; the first prefill also tells the shapes of linear-attention states."""
    engine.generate([Request("warm", tuple(range(1, 9)), 1, SamplingParams(max_new_tokens=2, seed=0))])


def prompt_of(name: str, length: int, seed: int, sampling: SamplingParams, samples: int = 1) -> Request:
    """A request with a prompt of ``length`` tokens, different for each seed; ids that every shape's vocabulary has."""
    return Request(name, tuple((17 * j + 5 * seed) % 101 for j in range(length)), samples, sampling)


def step_seconds(engine: EmbeddedEngine, batch: int, context: int, repeats: int) -> float:
    """Median seconds of a decode step of ``batch`` sequences of ``context`` tokens: a replayed graph, or on a CPU."""
    on_gpu = engine.device.type == "cuda"
    if on_gpu and engine._runner.graphs is None:
        raise RuntimeError("the engine has no CUDA graphs")
    return median(Steps(engine, batch, context).own().seconds(repeats if on_gpu else min(repeats, 3)))


@torch.no_grad()
def tail_seconds(bench: Bench, engine: EmbeddedEngine, batch: int) -> float:
    """Seconds of head and sampler, which a step has once however many layers it has."""
    runner = engine._runner
    inputs = runner.inputs.fill(decode_rows(engine, batch, 1), batch, 1)
    draw = inputs.draw(inputs.positions + 1)
    weight = engine.model.get_input_embeddings().weight  # type: ignore[operator]
    hidden = torch.randn(batch, engine.layout.hidden, device=engine.device).to(weight.dtype)
    return bench.time([lambda: runner._sample(runner.head(hidden), draw, False)])


def _peer(bench: Bench, part: Slice, batch: int) -> None:
    name = f"decode {part.label} B{batch} {part.length}"
    try:
        seconds = peer_step(part.shape.config(part.layers), bench.device, batch, part.context)
        bound = 1e6 * sizes(part.name, part.layers, get_spec("bf16")).step(batch, part.context) / bench.bandwidth
        detail = f"{batch / seconds:.0f} tok/s, generate with a static cache"
        bench.keep(Row(name, PEER, 1e6 * seconds, "us", bound, detail=detail))
    except (*failures(), AttributeError) as error:  # other versions of transformers may lack what is set there
        bench.fail(name, PEER, error)
    release()


def bench_prefill(bench: Bench, part: Slice, prompts: int = 4) -> None:
    """Prompt tokens a second, from the request to its first token, on the host's clock."""
    length = part.context
    for spec in ("bf16", "nvfp4-w4a4-kv4"):
        arm, name = arm_of(spec), f"prefill {part.label} {prompts}x{length}"
        try:
            engine = make_engine(part, spec, None, bench.device, 2 * prompts * length, 2 * prompts)
            requests = [prompt_of(f"{i}", length, i, SamplingParams(max_new_tokens=1, seed=0)) for i in range(prompts)]
            seconds = median(host_seconds(lambda e=engine, r=requests: e.generate(r), 3))
            bench.keep(Row(name, arm, prompts * length / seconds, "tok/s", detail="median of 3, first left out"))
            del engine
        except failures() as error:
            bench.fail(name, arm, error)
        release()


def host_seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of ``repeats`` runs on the host's clock, after one that does not count."""
    samples = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    return samples[1:]
