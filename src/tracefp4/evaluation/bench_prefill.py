"""Benchmarks of prefill: prompts forwarded in chunks by the engine, and the attention of one chunk by itself.

Prefill is bound by operations, not by bytes: a chunk of thousands of tokens uses each weight hundreds of times. On a
GPU without FP4 tensor cores all arms make the same bfloat16 products, so FP4 has nothing to gain but what moves between
caches, and its widening to pay for. The bound is the larger of::

    operations / rate of a large bfloat16 product in this run      2 a weight and token; 4 a head, width and pair of
                                                                   tokens of which one attends to the other
    bytes / bandwidth                                              weights of the experts that a chunk hits, K and V
                                                                   written once and read once a chunk, states

Prompts are random tokens. Beside the engine stands transformers itself: the same model with PyTorch's attention and
grouped products, chunk by chunk with its dynamic cache, or several prompts at once where a chunk holds them; with
``compiled`` also under ``torch.compile``, where prompts are whole and nothing has to be cached. The engine compiles
decode steps alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Request, SamplingParams
from tracefp4.evaluation.bench import Bench, Row, Work, failures, host_seconds, need_cuda
from tracefp4.evaluation.bench_engine import Slice, arm_of, make_engine, paged, release
from tracefp4.evaluation.bench_kernels import ATTENTION, random_values
from tracefp4.evaluation.bench_peer import PEER, peer_prefill
from tracefp4.evaluation.bench_shapes import SHAPES, Sizes, random_model, sizes
from tracefp4.evaluation.fill import fill_kv
from tracefp4.formats.fused import rules
from tracefp4.formats.numerics import get_numerics
from tracefp4.formats.spec import get_spec
from tracefp4.models.layout import describe

SPECS = ("bf16", "nvfp4-w4a4-kv4")
ARMS = (*SPECS, PEER)
CHUNK = 8192
"""Prompt tokens of a forward pass."""
CHUNK_OF_QUERIES = 2048
"""New tokens of a sequence, where attention is measured alone."""
RUNS = 3
KV_FORMATS = (("bf16", None), ("fp4 nvfp4", "sglang-kv-nvfp4"), ("fp4 mxfp4", "mxfp4-ceil"))
"""Arm and numerics of a KV cache."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts of one length, and the tokens that are forwarded together."""

    part: Slice
    prompts: int
    chunk: int

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return self.prompts * self.part.context

    @property
    def label(self) -> str:
        """In the table."""
        return f"prefill {self.part.measured} {self.prompts}x{self.part.context} chunk {self.chunk}"

    def ids(self, vocabulary: int) -> Tensor:
        """Random tokens ``(prompts, context)`` on the host."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocabulary, (self.prompts, self.part.context), generator=generator)

    def flops(self) -> float:
        """Operations of all prompts."""
        return prefill_flops(self.part.name, self.part.layers, self.prompts, self.part.context)

    def nbytes(self, size: Sizes) -> float:
        """Bytes that have to move: weights and states once a chunk, K and V written once and read once a chunk."""
        length, chunk = self.part.context, min(self.chunk, self.part.context)
        ends = [min(start + chunk, length) for start in range(0, length, chunk)]
        passes = -(-self.tokens // self.chunk)
        weights = size.dense + size.experts * size.uniform(min(self.chunk, self.tokens)) / size.num_experts
        cache = length * size.token + sum(ends) * size.token + 2 * len(ends) * size.state
        return passes * weights + self.prompts * cache


def prefill_flops(name: str, layers: int, prompts: int, length: int) -> float:
    """Floating-point operations of forwarding ``prompts`` prompts of ``length`` tokens; the head sees one of each."""
    active, head, pair, recurrent = _operations(name, layers)
    return prompts * (length * (active + recurrent) + head + pair * length * (length + 1) / 2)


@lru_cache(maxsize=16)
def _operations(name: str, layers: int) -> tuple[float, float, float, float]:
    """Operations by what they grow with.

    Returns:
        Those of a token in all products but the head; of the head; of a pair of tokens in softmax attention; of a token
        in the recurrence of gated delta nets, which reads for a key and for a query and adds an outer product.
    """
    config, size = SHAPES[name].config(layers), sizes(name, layers, get_spec("bf16"))
    layout = describe(random_model(config, torch.device("meta")))
    # Two operations a weight, and a weight of bfloat16 has two bytes.
    head = 2.0 * config.vocab_size * layout.hidden
    active = size.dense - head + size.experts * size.top_k / size.num_experts
    pair = 2.0 * len(layout.kv_layers) * layout.heads * (layout.head_dim + layout.v_head_dim)
    recurrent = 0.0
    if layout.linear_layers:
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        recurrent = 6.0 * len(layout.linear_layers) * state
    return active, head, pair, recurrent


def bench_prefill(
    bench: Bench, part: Slice, prompts: int = 4, chunk: int = CHUNK, arms: tuple[str, ...] = ARMS
) -> None:
    """Prompt tokens a second, from the request to its first token, on the host's clock.

    Args:
        bench: where rows go.
        part: what is measured; its context is the length of a prompt. Compiled, the peer is measured compiled as well.
        prompts: that wait together.
        chunk: prompt tokens of a forward pass.
        arms: of :data:`ARMS`.
    """
    case = Prefill(replace(part, compiled=False), prompts, chunk)
    for arm in arms:
        if arm == PEER:
            _peer(bench, case, part.compiled)
        else:
            _engine(bench, case, arm)
            release()


def _engine(bench: Bench, case: Prefill, spec: str) -> None:
    part, length = case.part, case.part.context
    try:
        engine = make_engine(part, spec, None, bench.device, case.prompts * paged(length + 1), case.prompts, case.chunk)
        ids, sampling = case.ids(engine._vocabulary), SamplingParams(max_new_tokens=1, seed=0)
        requests = [Request(str(i), tuple(row), 1, sampling) for i, row in enumerate(ids.tolist())]
        seconds = median(host_seconds(lambda: engine.generate(requests), RUNS))
    except failures() as error:
        bench.fail(case.label, arm_of(spec), error)
        return
    _keep(bench, case, arm_of(spec), seconds, part.sizes(get_spec(spec)), f"median of {RUNS}, first left out")


def _keep(bench: Bench, case: Prefill, arm: str, seconds: float, size: Sizes, detail: str) -> None:
    flops, nbytes = case.flops(), case.nbytes(size)
    numbers = {
        "total_ms": 1e3 * seconds,
        "operations_ms": 1e3 * flops / bench.product_rate,
        "bytes_ms": 1e3 * nbytes / bench.bandwidth,
        "product_tflop_s": bench.product_rate / 1e12,
    }
    detail = f"{flops / seconds / 1e12:.3g} TFLOP/s, {detail}"
    bound = case.tokens / bench.least(nbytes, flops)
    bench.keep(Row(case.label, arm, case.tokens / seconds, "tok/s", bound, detail=detail, numbers=numbers))


def _peer(bench: Bench, case: Prefill, too: bool) -> None:
    """Transformers as written and, if wanted and possible, compiled ``too``."""
    part, size = case.part, case.part.sizes(get_spec("bf16"))
    config = part.shape.config(part.layers)
    ids = case.ids(config.vocab_size).to(bench.device)
    for compiled in (False, True) if too else (False,):
        arm = PEER + " compiled" * compiled
        if compiled and case.chunk < part.context:
            bench.note(f"{arm} was left out of {case.label}: prompts are longer than a chunk")
            continue
        try:
            seconds = _peer_seconds(bench, config, ids, case.chunk, compiled)
            _keep(bench, case, arm, seconds, size, "SDPA" + ", nothing cached" * compiled)
        except (*failures(), AttributeError) as error:  # other versions of transformers may lack what is set there
            bench.fail(case.label, arm, error)
        release(compiled=compiled)


def _peer_seconds(bench: Bench, config: Any, ids: Tensor, chunk: int, compiled: bool) -> float:
    torch.manual_seed(0)
    return median(host_seconds(peer_prefill(config, bench.device, ids, chunk, compiled), RUNS))


def bench_prefill_attention(
    bench: Bench,
    shapes: tuple[str, ...] = tuple(ATTENTION),
    batches: tuple[int, ...] = (1,),
    contexts: tuple[int, ...] = (8192, 32768),
    chunk: int = CHUNK_OF_QUERIES,
) -> None:
    """Attention of the newest ``chunk`` tokens of each sequence over all of it, and PyTorch's over dense tensors.

    Raises:
        ConfigError: the device is no GPU.
    """
    need_cuda(bench, "attention")
    for shape in shapes:
        for batch in batches:
            for context in contexts:
                _attention_case(bench, shape, batch, context, min(chunk, context))


def attention_flops(heads: int, width: int, chunk: int, context: int) -> float:
    """Operations of causal attention of the last ``chunk`` tokens of one sequence."""
    return 4.0 * heads * width * (chunk * (context - chunk) + chunk * (chunk + 1) / 2)


def prefill_configs() -> list[dict[str, Any]]:
    """Arguments of :func:`tracefp4.kernels.attention_prefill.prefill_attention`: the default, and tiles beside it."""
    tiles = ((128, 64, 8, 2), (64, 64, 4, 5), (64, 32, 4, 5), (128, 32, 8, 5))
    return [{}, *(dict(zip(("rows", "columns", "warps", "stages"), tile, strict=True)) for tile in tiles)]


def _attention_case(bench: Bench, shape: str, batch: int, context: int, chunk: int) -> None:
    from tracefp4.kernels.attention_prefill import prefill_attention
    from tracefp4.kernels.kv_append import pool_tensors

    heads, kv_heads, width = ATTENTION[shape]
    name, page = f"prefill attention {shape} B{batch} {chunk} over {context}", 16
    q = random_values(bench, batch * chunk, heads * width).view(batch * chunk, heads, width)
    pages = torch.randperm(-(-context // page) * batch, device=bench.device).view(batch, -1)
    slots = pages[:, :, None] * page + torch.arange(page, device=bench.device)
    slots = slots.flatten(1)[:, :context].flatten()
    table = torch.tensor([[i * chunk, chunk, i * context, context] for i in range(batch)], device=bench.device)
    flops = batch * attention_flops(heads, width, chunk, context)
    for arm, numerics in KV_FORMATS:
        made = None if numerics is None else rules(get_numerics(numerics))
        kv = pool_tensors(pages.numel() * page, kv_heads, width, made, bench.device)
        fill_kv(kv, made)
        nbytes = kv.codes.nbytes + (0 if kv.scales is None else kv.scales.nbytes) + 2 * q.nbytes
        cases: list[tuple[str, list[Work]]] = []
        for config in prefill_configs():
            text = ", ".join(f"{key} {value}" for key, value in config.items()) or "default"
            work = partial(prefill_attention, q, kv, slots, table, chunk, width**-0.5, **config)
            cases.append((text, [work]))
        bench.best(name, arm, cases, nbytes, flops)
        del kv, cases, work
    _dense(bench, name, q.view(batch, chunk, heads, width).transpose(1, 2), kv_heads, context, flops)


def _dense(bench: Bench, name: str, q: Tensor, kv_heads: int, context: int, flops: float) -> None:
    """PyTorch's own over ``q (B, heads, chunk, width)``: causal, and without a mask, which is a few per cent more."""
    from torch.nn.attention.bias import causal_lower_right

    batch, _, chunk, width = q.shape
    k, v = (torch.randn(batch, kv_heads, context, width, device=q.device, dtype=q.dtype) for _ in range(2))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, enable_gqa=True)
    cases: list[tuple[str, list[Work]]] = [
        ("flash, causal", [partial(attend, attn_mask=causal_lower_right(chunk, context))])
    ]
    if context > chunk:
        cases.append(("unmasked", [attend]))
    bench.best(name, "sdpa", cases, k.nbytes + v.nbytes + 2 * q.nbytes, flops)
