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
over. What is timed is an engine's second rollout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tracefp4.core import Request, Rollout, SamplingParams
from tracefp4.evaluation.bench import Bench, Row, failures
from tracefp4.evaluation.bench_engine import (
    PAGE,
    Slice,
    arm_of,
    make_engine,
    paged,
    prompt_of,
    release,
    slice_of,
)
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.late_store import LateStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.store import Store
from tracefp4.guidance.workers import side_by_side


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
    part = slice_of(name, layers, prompt_length + new_tokens, compiled)
    for spec, plan in ARMS:
        arm, case = arm_of(spec, plan), f"rollout {name} {prompts * samples}x{new_tokens}{part.suffix}"
        try:
            seconds, claims = _seconds(bench, part, spec, plan, prompts, samples, new_tokens)
        except failures() as error:
            bench.fail(case, arm, error)
            release()
            continue
        release()
        tokens = prompts * samples * new_tokens
        moved, launched = step_bounds(bench, part, spec, prompts * samples, new_tokens)
        steps = new_tokens - 1
        bound = tokens / (steps * max(moved, launched))
        detail = f"bound of a step: bytes {1e6 * moved:.0f} us, launches {1e6 * launched:.0f} us"
        bench.keep(Row(case, arm, tokens / seconds, "tok/s", bound, detail=detail))
        if claims is not None:
            rate = tokens / (seconds + claims.seconds)
            bench.keep(Row(case, f"{arm} all claimed", rate, "tok/s", bound, detail=str(claims)))


def step_bounds(bench: Bench, part: Slice, spec: str, batch: int, new_tokens: int) -> tuple[float, float]:
    """Seconds that an average decode step needs for its bytes, and for its launches."""
    context = part.context - new_tokens // 2
    moved = part.sizes(get_spec(spec)).step(batch, context) / bench.bandwidth
    return moved, (part.layers * LAYER_KERNELS + STEP_KERNELS) * bench.launch


def _seconds(
    bench: Bench, part: Slice, spec: str, plan: str | None, prompts: int, samples: int, new_tokens: int
) -> tuple[float, Claims | None]:  # fmt: skip
    """Seconds of the rollout, and what came of its guidance if there is any."""
    batch, store = prompts * samples, LateStore(MemoryStore())
    room = batch * (paged(part.context) + PAGE)
    engine = make_engine(part, spec, plan, bench.device, room, batch, store=store)
    length = part.context - new_tokens

    def requests(seed: int) -> list[Request]:
        sampling = SamplingParams(max_new_tokens=new_tokens, seed=seed)
        return [prompt_of(f"{seed}.{i}", length, i, sampling, samples) for i in range(prompts)]

    # The first rollout compiles, captures graphs and finds memory for guidance; what counts is every later one.
    _claim(store, engine.generate(requests(0)))
    store.clear()
    start = time.perf_counter()
    rollouts = engine.generate(requests(1))
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    short_ones = sum(len(rollout.response_ids) < new_tokens for rollout in rollouts)
    if short_ones:
        raise RuntimeError(f"{short_ones} of {len(rollouts)} sequences ended before {new_tokens} tokens")
    return seconds, _claim(store, rollouts)


def _claim(store: Store, rollouts: Sequence[Rollout]) -> Claims | None:
    """Claim all guidance, side by side as a micro-batch does."""
    handles = [rollout.guidance for rollout in rollouts if rollout.guidance is not None]
    if not handles:
        return None
    start = time.perf_counter()
    side_by_side([partial(store.get, handle) for handle in handles])
    return Claims(len(handles), sum(handle.nbytes for handle in handles), time.perf_counter() - start)
