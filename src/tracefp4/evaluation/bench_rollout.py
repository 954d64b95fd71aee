"""A whole rollout of a small model: from requests to finished sequences, on the host's clock.

The case is SmolLM2-MoE with 512 sequences of 256 new tokens, 64 prompts with 8 samples each. Nothing can be faster
than its decode steps, and a step has two limits:

- *bytes*: weights once (with 512 tokens every expert is hit), and K and V of all tokens so far, on average the prompt
  and half of the response;
- *launches*: kernels that depend on one another. A layer needs at least 13 of them: norm; Q, K and V; RoPE and store;
  attention; output; norm with residual; router; choice of experts; places and tiles of pairs; gate and up; SiLU with
  rounding; down; weighted sum. Five more stand around the layers: embedding, last norm, head, noise
  with argmax, log-probability. A dependent kernel that does nothing takes ``launch`` seconds in a CUDA graph, which is
  measured in the same run.

The bound of a run is ``steps x max(bytes / bandwidth, kernels x launch)``; prefill, sampling of first tokens and the
host's work count as zero in it. Model and prompts are random, no token ends a sequence.

Guidance waits with the engine until it is claimed, as in a run, where only that of samples that train is. So the
recorded arm claims nothing, and a second row of it adds the time in which all frames are written once the rollout is
over. What is timed is an engine's second rollout, watched while it runs (:mod:`tracefp4.evaluation.watch`): a row has
the time of prefill, of decode steps on the host and on the device, and of the rest as numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tracefp4.core import Request, Rollout, SamplingParams
from tracefp4.evaluation.bench import Bench, Row, failures, wait_for
from tracefp4.evaluation.bench_engine import (
    PAGE,
    Slice,
    arm_of,
    make_engine,
    paged,
    prompt_of,
    release,
    slice_of,
    step_seconds,
)
from tracefp4.evaluation.watch import watched
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.late_store import LateStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.store import Store
from tracefp4.guidance.workers import side_by_side
from tracefp4.rollout.embedded import EmbeddedEngine


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is to sample."""

    prompts: int = 64
    samples: int = 8
    prompt_length: int = 64
    new_tokens: int = 256

    @property
    def batch(self) -> int:
        """Sequences, which all decode at once."""
        return self.prompts * self.samples

    @property
    def context(self) -> int:
        """Tokens of a sequence in the end."""
        return self.prompt_length + self.new_tokens

    def requests(self, seed: int) -> list[Request]:
        """The prompts, others for each seed."""
        sampling = SamplingParams(max_new_tokens=self.new_tokens, seed=seed)
        return [prompt_of(f"{seed}.{i}", self.prompt_length, i, sampling, self.samples) for i in range(self.prompts)]

    def engine(self, part: Slice, spec: str, plan: str | None, device: torch.device, store: Store) -> EmbeddedEngine:
        """An engine with room for all of it."""
        room = self.batch * (paged(self.context) + PAGE)
        return make_engine(part, spec, plan, device, room, self.batch, store=store)


@dataclass(frozen=True, slots=True)
class Claims:
    """Frames that were written when the rollout was over."""

    frames: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e9
        return f"{self.frames} frames, {self.nbytes / 1e6:.0f} MB, in {1e3 * self.seconds:.0f} ms: {rate:.2f} GB/s"


LAYER_KERNELS, STEP_KERNELS = 13, 5
"""Dependent kernels of a layer, and around the layers."""
DEVICE_REPEATS = 20
"""Replays of the graph of a step of all sequences, at half of their responses; the median counts."""
ARMS = (("bf16", None), ("nvfp4-w4a4-kv4", None), ("nvfp4-w4a4-kv4", "r1-all+mid/s3"))


def bench_rollout(
    bench: Bench,
    name: str = "smollm2-moe",
    prompts: int = 64,
    samples: int = 8,
    new_tokens: int = 256,
    prompt_length: int = 64,
    layers: int | None = None,
    compiled: bool = False,
) -> None:
    """Tokens a second of a whole rollout, for BF16, FP4, FP4 with guidance recorded, and with all of it claimed."""
    load = Load(prompts, samples, prompt_length, new_tokens)
    part = slice_of(name, layers, load.context, compiled)
    for spec, plan in ARMS:
        arm, case = arm_of(spec, plan), f"rollout {name} {load.batch}x{new_tokens}{part.suffix}"
        try:
            seconds, numbers, claims = _measured(bench, part, spec, plan, load)
        except failures() as error:
            bench.fail(case, arm, error)
            release()
            continue
        release()
        tokens = load.batch * new_tokens
        moved, launched = step_bounds(bench, part, spec, load.batch, new_tokens)
        steps = new_tokens - 1
        bound = tokens / (steps * max(moved, launched))
        detail = f"{_said(numbers)}; bound of a step: bytes {1e6 * moved:.0f} us, launches {1e6 * launched:.0f} us"
        bench.keep(Row(case, arm, tokens / seconds, "tok/s", bound, detail=detail, numbers=numbers))
        if claims is not None:
            rate = tokens / (seconds + claims.seconds)
            numbers = {"frames": claims.frames, "frame_bytes": claims.nbytes, "claim_ms": 1e3 * claims.seconds}
            bench.keep(Row(case, f"{arm} all claimed", rate, "tok/s", bound, detail=str(claims), numbers=numbers))


def _said(numbers: dict[str, float]) -> str:
    """Where the time went, in words."""
    text = f"prefill {numbers['prefill_ms']:.0f} ms, {numbers['steps']} steps {numbers['decode_ms']:.0f} ms"
    if "between_launches_us" in numbers:
        text += f" (us: {numbers['between_launches_us']:.0f}, p95 {numbers['between_launches_p95_us']:.0f}"
        text += f", host {numbers['host_us']:.0f}"
        text += f", device {numbers['device_step_us']:.0f})" if "device_step_us" in numbers else ")"
    return text + f", rest {numbers['rest_ms']:.0f} ms (gathering {numbers['gather_ms']:.0f})"


def step_bounds(bench: Bench, part: Slice, spec: str, batch: int, new_tokens: int) -> tuple[float, float]:
    """Seconds that an average decode step needs for its bytes, and for its launches."""
    context = part.context - new_tokens // 2
    moved = part.sizes(get_spec(spec)).step(batch, context) / bench.bandwidth
    return moved, (part.layers * LAYER_KERNELS + STEP_KERNELS) * bench.launch


def _measured(
    bench: Bench, part: Slice, spec: str, plan: str | None, load: Load
) -> tuple[float, dict[str, float], Claims | None]:
    """Seconds of the rollout, where they went, and what came of its guidance if there is any."""
    store = LateStore(MemoryStore())
    engine = load.engine(part, spec, plan, bench.device, store)
    # The first rollout compiles, captures graphs and finds memory for guidance; what counts is every later one.
    _claim(store, engine.generate(load.requests(0)))
    store.clear()
    with watched(engine) as watch:
        start = time.perf_counter()
        rollouts = engine.generate(load.requests(1))
        wait_for(bench.device)
        seconds = time.perf_counter() - start
    short_ones = sum(len(rollout.response_ids) < load.new_tokens for rollout in rollouts)
    if short_ones:
        raise RuntimeError(f"{short_ones} of {len(rollouts)} sequences ended before {load.new_tokens} tokens")
    numbers, claims = watch.numbers(seconds), _claim(store, rollouts)
    if bench.device.type == "cuda":
        context = load.context - load.new_tokens // 2
        try:
            numbers["device_step_us"] = 1e6 * step_seconds(engine, load.batch, context, DEVICE_REPEATS)
        except failures() as error:  # the rollout is measured all the same
            bench.fail(f"rollout {part.name}, a step on the device", arm_of(spec, plan), error)
    return seconds, numbers, claims


def _claim(store: Store, rollouts: Sequence[Rollout]) -> Claims | None:
    """Claim all guidance, side by side as a micro-batch does."""
    handles = [rollout.guidance for rollout in rollouts if rollout.guidance is not None]
    if not handles:
        return None
    start = time.perf_counter()
    side_by_side([partial(store.get, handle) for handle in handles])
    return Claims(len(handles), sum(handle.nbytes for handle in handles), time.perf_counter() - start)
