"""Benchmarks of the embedded engine: the decode step, what capture adds to it, and prefill.

The model has the shape of Qwen3-30B-A3B (or a smaller one) with random weights and fewer layers; embedding and head are
whole, so a step costs ``layers`` times a layer plus the head, and the bound is made of the same bytes. A decode step is
timed as one CUDA graph over sequences of a fixed length: their pages hold whatever the pool was filled with, which
changes no instruction. The four precision combinations are four specs, each in an engine of its own, in one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.evaluation.bench import Bench, Row, failures, need_cuda
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.rollout.embedded import EmbeddedEngine
from tracefp4.rollout.inputs import DecodeRow
from tracefp4.rollout.request import Sequence

SPECS = ("bf16", "nvfp4-w4a4", "nvfp4-kv4", "nvfp4-w4a4-kv4", "mxfp4-w4a4-kv4")
"""Precision combinations of a decode step."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A mixture-of-experts model; the defaults are Qwen3-30B-A3B's with 8 of its 48 layers."""

    layers: int = 8
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    top_k: int = 8
    inter: int = 768
    vocabulary: int = 151936


def random_model(shape: Shape, device: torch.device) -> Any:
    """A Qwen3-MoE model with random weights, made on ``device``."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.inter,
        intermediate_size=shape.inter,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        norm_topk_prob=True,
    )
    config.head_dim = shape.head_dim
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
    return model.eval()


def bench_decode(
    bench: Bench, batches: tuple[int, ...] = (1, 16, 64), context: int = 8192, shape: Shape | None = None
) -> None:
    """One decode step at fixed batch, for each precision combination."""
    need_cuda(bench, "decode")
    for spec in SPECS:
        _steps(bench, spec, None, batches, context, shape or Shape())


def bench_capture(bench: Bench, batch: int = 64, context: int = 8192, shape: Shape | None = None) -> None:
    """The same step with guidance recorded under several plans."""
    need_cuda(bench, "capture")
    for plan in (None, "r1-l4", "r1-all", "r4-all+mid"):
        _steps(bench, "nvfp4-w4a4-kv4", plan, (batch,), context, shape or Shape())


def _steps(
    bench: Bench, spec: str, plan: str | None, batches: tuple[int, ...], context: int, shape: Shape
) -> None:  # fmt: skip
    arm = "bf16" if spec == "bf16" else f"fp4 {spec}" + ("" if plan is None else f" {plan}")
    try:
        engine = _engine(spec, plan, max(batches), context, shape, bench.device)
    except failures() as error:
        bench.fail("decode engine", arm, error)
        return
    for batch in batches:
        name = f"decode {shape.layers} layers B{batch} {context // 1024}K"
        try:
            seconds = _step_seconds(engine, batch, context, bench.repeats)
        except failures() as error:
            bench.fail(name, arm, error)
            continue
        bound = 1e6 * step_bytes(shape, spec, batch, context) / bench.bandwidth
        bench.rows.append(
            Row(name, arm, 1e6 * seconds, "us", bound, detail=f"{batch / seconds:.0f} tok/s of these layers")
        )
    del engine
    torch.cuda.empty_cache()


def _engine(
    spec: str, plan: str | None, batch: int, context: int, shape: Shape, device: torch.device
) -> EmbeddedEngine:  # fmt: skip
    model = random_model(shape, device)
    return EmbeddedEngine(
        model, None, get_spec(spec), None if plan is None else Plan.parse(plan), MemoryStore(),
        max_tokens=batch * context, max_batch=batch, prefill_chunk=4096,
    )  # fmt: skip


@torch.no_grad()
def _step_seconds(engine: EmbeddedEngine, batch: int, context: int, repeats: int) -> float:
    """Median seconds of a replayed decode step of ``batch`` sequences of ``context`` tokens."""
    runner = engine._runner
    size = engine.pages.page_size
    width = context // size
    sampling = SamplingParams(max_new_tokens=1, seed=0)
    rows = []
    for i in range(batch):
        sequence = Sequence(Request(str(i), (1,), 1, sampling), 0, i, i, False)
        sequence.ticket = 1
        pages = list(range(i * width, (i + 1) * width))
        rows.append(DecodeRow(17 + i, context - 1, pages, sequence))
    if runner.graphs is None:
        raise RuntimeError("the engine has no CUDA graphs")
    runner.graphs.run(rows, width, False)
    graph = runner.graphs.captured(len(rows), width, False)
    samples = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop) / 1e3)
    return sorted(samples)[len(samples) // 2]


def step_bytes(shape: Shape, spec: str, batch: int, context: int) -> float:
    """Bytes that a decode step has to read: weights once, of the experts that uniform routing hits, and all of K and V.

    Experts hit: ``E (1 - (1 - k / E)^B)``.
    """
    weights, kv = get_spec(spec).weights, get_spec(spec).kv
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    dense = 2 * (shape.layers * (attention + shape.hidden * shape.experts) + shape.vocabulary * shape.hidden)
    hit = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** batch)
    per_weight = 2.0 if weights is None else 0.5 + 1 / weights.block
    per_kv = 2.0 if kv is None else 0.5 + 1 / kv.block
    experts = shape.layers * hit * 3 * shape.hidden * shape.inter * per_weight
    cache = batch * context * shape.layers * 2 * shape.kv_heads * shape.head_dim * per_kv
    return dense + experts + cache


def bench_prefill(bench: Bench, prompts: int = 4, length: int = 4096, shape: Shape | None = None) -> None:
    """Prompt tokens a second, from the request to its first token, on the host's clock."""
    import time

    need_cuda(bench, "prefill")
    shape = shape or Shape()
    for spec in ("bf16", "nvfp4-w4a4-kv4"):
        arm = "bf16" if spec == "bf16" else f"fp4 {spec}"
        name = f"prefill {shape.layers} layers {prompts}x{length}"
        try:
            engine = _engine(spec, None, 2 * prompts, length, shape, bench.device)
            samples = []
            for turn in range(4):
                requests = [
                    Request(f"{turn}.{i}", tuple((17 * j + i + turn) % 1000 for j in range(length)), 1,
                            SamplingParams(max_new_tokens=1, seed=0)) for i in range(prompts)
                ]  # fmt: skip
                start = time.perf_counter()
                engine.generate(requests)
                torch.cuda.synchronize()
                samples.append(time.perf_counter() - start)
            seconds = sorted(samples[1:])[1]
            bench.rows.append(Row(name, arm, prompts * length / seconds, "tok/s", detail="median of 3, first left out"))
            del engine
        except failures() as error:
            bench.fail(name, arm, error)
        torch.cuda.empty_cache()
