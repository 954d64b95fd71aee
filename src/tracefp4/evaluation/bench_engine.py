"""Benchmark of the embedded engine: the decode step.

The model has the shape of a large one (:mod:`tracefp4.evaluation.bench_shapes`) with random weights, the same in all
arms, and mostly with fewer layers. A decode step is timed as one CUDA graph over sequences of a fixed length, with
tokens of their own and a pool full of ordinary numbers (:mod:`tracefp4.evaluation.fill`). The precision combinations
are specs, each in an engine of its own, in one run. The bytes of a bound are those of the experts that the step really
hit: rows say how many those were, and how many uniform routing would hit.

Two ratios must not be confused. At a *fixed batch* both arms serve the same sequences, and FP4 can gain no more than
the bytes a value. *Memory-limited*, each arm serves as many sequences as a budget of bytes holds beside its weights,
and FP4 gains twice: smaller weights leave more room, and a token of K and V takes less of it. The budget is that of the
whole model; the slice serves the batch that the whole model could, with a smaller pool.

Head and sampler weigh more in a slice than in the whole model. They are timed on their own, and rows called *whole* say
what ``L`` layers would take if each took what a layer of the slice does::

    whole = tail + (slice - tail) L / layers of the slice

A slice that has all layers is the whole model, and its rows are what was measured.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import median

import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.evaluation.bench import Bench, Row, failures
from tracefp4.evaluation.bench_peer import PEER, peer_step
from tracefp4.evaluation.bench_shapes import SHAPES, Shape, Sizes, random_model, sizes
from tracefp4.evaluation.fill import fill_engine
from tracefp4.evaluation.steps import Step, Steps, decode_rows
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
        """The whole model, measured or estimated from the slice."""
        return f"{self.name} whole" + self.suffix

    @property
    def complete(self) -> bool:
        """Whether the slice is the whole model."""
        return self.layers == self.shape.layers

    @property
    def measured(self) -> str:
        """What is measured: the slice, or the whole model if it has all layers."""
        return self.whole if self.complete else self.label

    def seen(self, seconds: float, tail: float) -> list[tuple[str, float, int, str]]:
        """What a step of ``seconds``, head and sampler of ``tail`` among them, says of the slice and the whole model.

        Returns:
            label, seconds, layers, and where they are from.
        """
        own = (self.measured, seconds, self.layers, f"all {self.layers} layers" if self.complete else "")
        if self.complete:
            return [own]
        whole = tail + max(seconds - tail, 0.0) * self.shape.layers / self.layers
        return [own, (self.whole, whole, self.shape.layers, f"from {self.layers} layers")]

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
            # The next arm needs the memory: two whole models do not fit side by side.
            release(compiled=part.compiled)


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

    Engines of one slice have the same weights. Its frames wait in ``store``, or in one of its own of the kind that runs
    use, where they are written when claimed.
    """
    torch.manual_seed(0)
    return EmbeddedEngine(
        random_model(part.shape.config(part.layers), device), None, get_spec(spec),
        None if plan is None else Plan.parse(plan), LateStore(MemoryStore()) if store is None else store,
        max_tokens=paged(tokens), page_size=PAGE, max_batch=batch, prefill_chunk=chunk,
        compile_decode=part.compiled, state_dtype=part.state_dtype,
    )  # fmt: skip


def paged(tokens: int) -> int:
    """Slots of the pages that hold ``tokens`` tokens."""
    return -(-tokens // PAGE) * PAGE


def release(*, compiled: bool = False) -> None:
    """Free the memory of engines that are gone: their parts refer to each other.

    Args:
        compiled: forget compiled code too, which may hold what it was compiled with. What still runs compiles anew.
    """
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _steps(bench: Bench, part: Slice, spec: str, batches: tuple[int, ...], budget: float) -> None:
    arm, chosen = arm_of(spec), get_spec(spec)
    whole = part.sizes(chosen, part.shape.layers)
    limited = whole.fits(budget * GIB, part.context) if budget else 0
    most = max(*batches, limited)
    try:
        engine = make_engine(part, spec, None, bench.device, most * paged(part.context), most)
        warm(engine)
        fill_engine(engine)
        _memory_rows(bench, part, arm, engine, part.sizes(chosen))
    except failures() as error:
        bench.fail(f"decode engine {part.label}", arm, error)
        return
    for batch in batches:
        _fixed(bench, part, arm, engine, batch)
    if limited:
        _limited(bench, part, arm, engine, limited, budget)
    elif budget:
        bench.fail(f"decode {part.measured} memory-limited", arm, f"{budget} GiB do not hold one sequence")


@dataclass(frozen=True, slots=True)
class Timed:
    """A step of the slice, or what it says of the whole model."""

    label: str
    seconds: float
    nbytes: float
    """That it has to move."""
    source: str
    """Where it is from."""
    numbers: dict[str, float]


def _fixed(bench: Bench, part: Slice, arm: str, engine: EmbeddedEngine, batch: int) -> None:
    for timed in _measured(bench, part, arm, engine, batch, f"B{batch} {part.length}"):
        bound = 1e6 * timed.nbytes / bench.bandwidth
        detail = f"{batch / timed.seconds:.0f} tok/s" + f", {timed.source}" * bool(timed.source)
        bench.keep(Row(timed.label, arm, 1e6 * timed.seconds, "us", bound, detail=detail, numbers=timed.numbers))


def _limited(bench: Bench, part: Slice, arm: str, engine: EmbeddedEngine, batch: int, budget: float) -> None:
    weights = part.sizes(engine.spec, part.shape.layers).weights / GIB
    for timed in _measured(bench, part, arm, engine, batch, f"memory-limited {part.length}"):
        bound = batch * bench.bandwidth / timed.nbytes
        detail = f"B{batch} in {budget:g} GiB, {weights:.1f} of them weights" + f", {timed.source}" * bool(timed.source)
        bench.keep(Row(timed.label, arm, batch / timed.seconds, "tok/s", bound, detail=detail, numbers=timed.numbers))


def _measured(bench: Bench, part: Slice, arm: str, engine: EmbeddedEngine, batch: int, name: str) -> list[Timed]:
    """A step of the slice and what the whole model would take; nothing if the step failed."""
    try:
        step = Steps(engine, batch, part.context).own()
        seconds = _median(step, bench.repeats)
        tail = tail_seconds(bench, engine, batch)
    except failures() as error:
        bench.fail(f"decode {part.measured} {name}", arm, error)
        return []
    hit, found = step.hit_experts(), []
    for label, value, layers, source in part.seen(seconds, tail):
        size = part.sizes(engine.spec, layers)
        numbers = {"batch": batch, "context": part.context, "layers": part.layers, "tok_s": batch / value}
        if hit is not None:
            numbers |= {"hit_experts": hit, "uniform_experts": size.uniform(batch)}
        found.append(Timed(f"decode {label} {name}", value, size.step(batch, part.context, hit), source, numbers))
    return found


def _memory_rows(bench: Bench, part: Slice, arm: str, engine: EmbeddedEngine, own: Sizes) -> None:
    """What the engine really keeps, beside what it has to."""
    bench.keep(Row(f"weights {part.label}", arm, engine.weight_bytes / GIB, "GiB", own.weights / GIB, detail="as kept"))
    bench.keep(Row(f"KV a token {part.label}", arm, float(engine.token_bytes), "B", own.token))


def warm(engine: EmbeddedEngine) -> None:
    """Compile what a prefill and a step need; the first prefill also tells the shapes of linear-attention states."""
    engine.generate([Request("warm", tuple(range(1, 9)), 1, SamplingParams(max_new_tokens=2, seed=0))])


def prompt_of(name: str, length: int, seed: int, sampling: SamplingParams, samples: int = 1) -> Request:
    """A request with a prompt of ``length`` tokens, different for each seed; ids that every shape's vocabulary has."""
    return Request(name, tuple((17 * j + 5 * seed) % 101 for j in range(length)), samples, sampling)


def step_seconds(engine: EmbeddedEngine, batch: int, context: int, repeats: int) -> float:
    """Median seconds of a decode step of ``batch`` sequences of ``context`` tokens: a replayed graph, or on a CPU."""
    return _median(Steps(engine, batch, context).own(), repeats)


def _median(step: Step, repeats: int) -> float:
    on_gpu = step.engine.device.type == "cuda"
    if on_gpu and step.engine._runner.graphs is None:
        raise RuntimeError("the engine has no CUDA graphs")
    return median(step.seconds(repeats if on_gpu else min(repeats, 3)))


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
    name = f"decode {part.measured} B{batch} {part.length}"
    try:
        torch.manual_seed(0)
        seconds = peer_step(part.shape.config(part.layers), bench.device, batch, part.context)
        bound = 1e6 * part.sizes(get_spec("bf16")).step(batch, part.context) / bench.bandwidth
        detail = f"{batch / seconds:.0f} tok/s, generate with a static cache"
        detail += ", states as transformers keeps them" * (part.state_dtype != "float32")
        bench.keep(Row(name, PEER, 1e6 * seconds, "us", bound, detail=detail))
    except (*failures(), AttributeError) as error:  # other versions of transformers may lack what is set there
        bench.fail(name, PEER, error)
    release(compiled=True)  # generate compiles by itself, and a second batch would be traced with dynamic sizes
