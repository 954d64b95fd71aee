"""Engines on tiny models, and an independent reference: one forward pass over a whole sequence, without a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tracefp4.core import Kind, Request, Rollout, SamplingParams
from tracefp4.formats.blocks import Quantized, quantize, quantize_weight
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.guidance.frame import decode
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record
from tracefp4.models.binding import bound
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.models.sites import Operand
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.embedded import EmbeddedEngine

FP4 = "nvfp4-w4a4-kv4"
KERNEL_SIZES: dict[str, dict[str, int]] = {
    "gpt_oss": {"head_dim": 64, "intermediate_size": 128},
    "mixtral": {"head_dim": 64, "intermediate_size": 128},
    "olmoe": {"hidden_size": 128, "intermediate_size": 64},
    "deepseek_v3": {"moe_intermediate_size": 128},
}
"""Those families whose sizes have other names than most."""


@dataclass
class Naive:
    """Site objects that quantize to nearest over the whole sequence and remember what they saw."""

    layout: ModelLayout
    spec: Spec
    seen: dict[tuple[int, Kind], Quantized] = field(default_factory=dict)
    routes: dict[int, Tensor] = field(default_factory=dict)

    def experts(self, layer: int) -> NaiveSite:
        return NaiveSite(self, layer)

    router = attention = experts

    def fake(self, layer: int, kind: Kind, x: Tensor) -> Tensor:
        """Dequantized ``x (B, heads, S, width)``."""
        numerics = self.spec.kv if layer >= self.spec.bf16_layers else None
        if numerics is None:
            return x
        q = quantize(x.transpose(1, 2)[0].contiguous(), numerics)
        self.seen[layer, kind] = q
        return q.dequantize(x.dtype).unsqueeze(0).transpose(1, 2)


@dataclass
class NaiveSite:
    owner: Naive
    layer: int

    def gate_up(self, module: Any) -> Operand:
        return self._weight(module, module.gate_up_proj)

    def down(self, module: Any) -> Operand:
        return self._weight(module, module.down_proj)

    def _weight(self, module: Any, weight: Tensor) -> Operand:
        matrix = weight.detach().transpose(1, 2).contiguous() if module.is_transposed else weight.detach()
        if self.owner.spec.weights is None or self.layer < self.owner.spec.bf16_layers:
            return Operand(matrix, None)
        q = quantize_weight(matrix, self.owner.spec.weights)
        scale = q.decode_scale()
        return Operand(q.operand(), None if scale is None else scale.reshape(-1))

    def enter(self, x: Tensor) -> Operand:
        return self._activation(Kind.EXPERTS_IN, x, None)

    def middle(self, h: Tensor, pairs: Tensor) -> Operand:
        return self._activation(Kind.EXPERTS_MID, h, pairs)

    def _activation(self, kind: Kind, x: Tensor, pairs: Tensor | None) -> Operand:
        numerics = self.owner.spec.activations
        if numerics is None or self.layer < self.owner.spec.bf16_layers:
            return Operand(x, None)
        q = quantize(x, numerics)
        order = torch.arange(len(x)) if pairs is None else torch.argsort(pairs)
        scale = None if q.global_scale is None else q.global_scale[order]
        self.owner.seen[self.layer, kind] = Quantized(q.codes[order], q.scales[order], scale, numerics)
        return Operand(q.operand(), q.decode_scale())

    def route(self, indices: Tensor) -> None:
        self.owner.routes[self.layer] = indices

    def latent(self, x: Tensor) -> Tensor:
        return self.owner.fake(self.layer, Kind.LATENT, x.unsqueeze(1)).squeeze(1)

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, window: int | None, sinks: Any
    ) -> Tensor:
        rope = self.owner.layout.rope_dim
        if rope is not None:
            part = self.owner.fake(self.layer, Kind.K, k[:, :1, :, -rope:])
            k = torch.cat([k[..., :-rope], part.expand(-1, k.shape[1], -1, -1)], -1)
        else:
            k, v = self.owner.fake(self.layer, Kind.K, k), self.owner.fake(self.layer, Kind.V, v)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        hidden = (distance < 0) | (distance >= (window or q.shape[2]))
        logits = (q.float() @ k.transpose(2, 3) * scaling).masked_fill(hidden, float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.float().view(1, -1, 1, 1).expand(-1, -1, q.shape[2], 1)], -1)
        weights = torch.softmax(logits, -1)[..., : q.shape[2]]
        return (weights @ v).transpose(1, 2).to(q.dtype)


@dataclass
class Reference:
    """Scores a whole sequence."""

    model: Any
    spec: Spec

    def __post_init__(self) -> None:
        self.layout = describe(self.model)

    @torch.no_grad()
    def __call__(self, tokens: tuple[int, ...]) -> tuple[Tensor, Naive]:
        """Log-probabilities ``(N - 1, V)`` at temperature 1 of the next token, and what the sites saw."""
        sites = Naive(self.layout, self.spec)
        with bound(self.model, sites):
            logits = self.model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), -1), sites

    def score(self, rollout: Rollout) -> Tensor:
        """Log-probabilities of the response tokens."""
        table, _ = self(rollout.tokens)
        rows = torch.arange(len(rollout.prompt_ids) - 1, rollout.rows)
        return table[rows, torch.tensor(rollout.response_ids)]


@dataclass
class Bench:
    """An engine, the reference of the same weights, and the store between."""

    engine: EmbeddedEngine
    reference: Reference
    store: MemoryStore

    def record(self, rollout: Rollout) -> Record:
        assert rollout.guidance is not None
        return decode(self.store.get(rollout.guidance))


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    """Build engine and reference on equal tiny models; float32 unless told, so that a difference is a mistake."""

    def make(
        family: str = "qwen3_moe",
        spec: str = FP4,
        plan: str | None = "r4-all+mid/s8",
        dtype: torch.dtype = torch.float32,
        tokenizer: Any = None,
        device: str = "cpu",
        model_options: dict[str, Any] | None = None,
        model: Callable[[], Any] | None = None,
        **settings: Any,
    ) -> Bench:
        sizes = {"max_tokens": 512, "page_size": 4, "max_batch": 8, "prefill_chunk": 16} | settings
        store, chosen = MemoryStore(), get_spec(spec)
        options = {"seed": 3, "dtype": dtype, **(model_options or {})}
        build = model or functools.partial(tiny_model, family, **options)
        engine = EmbeddedEngine(
            build().to(device),
            tokenizer,
            chosen,
            Plan.parse(plan) if plan and spec != "bf16" else None,
            store,
            **sizes,
        )
        return Bench(engine, Reference(build(), chosen), store)

    return make


def request(name: str, length: int, samples: int = 1, **sampling: Any) -> Request:
    """A request with a prompt that depends on its name."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    prompt = tuple(torch.randint(0, 256, (length,), generator=generator).tolist())
    return Request(name, prompt, samples, SamplingParams(**{"max_new_tokens": 8, "seed": 7, **sampling}))


@pytest.fixture
def make_request() -> Callable[..., Request]:
    return request


@pytest.fixture
def kernel_sizes() -> Callable[[str], dict[str, int]]:
    """Options of a tiny model that kernels take, in bfloat16: heads of 64, and experts of multiples of 64.

    As it is, a tiny model has heads of 32 and experts of 96, and an engine falls back on plain code, on a GPU too.
    """
    return lambda family: dict(KERNEL_SIZES.get(family, {"head_dim": 64, "moe_intermediate_size": 128}))


@pytest.fixture
def uses_kernels() -> Callable[[EmbeddedEngine], bool]:
    """Whether attention and experts of an engine are computed by kernels."""
    return lambda engine: engine.pool.for_kernels and engine._runner.sites.experts_by_kernel
