"""Shapes of the models that benchmarks build with random weights, and the bytes that follow from them.

A benchmark has room for a *slice* of a large model: some of its layers, with embedding and head whole. What a slice and
the whole model weigh, and what a decode step of either has to read, is counted from the modules themselves, built on
the ``meta`` device, and from a spec:

    dense    every parameter but experts and input embedding, once a step
    experts  of the ``E`` experts of a layer, those that uniform routing of ``B`` tokens hits: ``E (1 - (1 - k/E)^B)``
    token    K and V of one token, read once for every token of context
    state    linear attention: a matrix a head and the inputs of a convolution, read and written
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from tracefp4.formats.spec import Spec
from tracefp4.models.layout import describe
from tracefp4.models.packing import expert_weights
from tracefp4.models.tiny import tiny_config
from tracefp4.rollout.state import state_dtype as dtype_of_states

LINEAR_PERIOD = 4
"""Hybrid models have softmax attention in every fourth layer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A mixture-of-experts model."""

    family: str
    """``model_type`` in transformers."""
    layers: int
    """Layers of the whole model."""
    slice: int
    """Layers that a benchmark takes unless told otherwise."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Sizes, under the names of the family's configuration."""
    hybrid: bool = False
    budget: float = 120.0
    """GiB for weights, K, V and states where memory is the limit: a GPU of 141 GB less what graphs and activations
    take."""

    def config(self, layers: int) -> Any:
        """The configuration of a model with ``layers`` layers."""
        kinds = {}
        if self.hybrid:
            full = [(i + 1) % LINEAR_PERIOD == 0 for i in range(layers)]
            kinds = {"layer_types": ["full_attention" if f else "linear_attention" for f in full]}
        fields = {"initializer_range": 0.02, **self.fields, **kinds, "num_hidden_layers": layers}
        return tiny_config(self.family, **fields)


_COMMON = {"hidden_size": 2048, "num_experts_per_tok": 8, "max_position_embeddings": 65536}
_SMALL = {"hidden_size": 64, "num_experts_per_tok": 2, "max_position_embeddings": 512, "vocab_size": 128}

SHAPES: dict[str, Shape] = {
    "30b": Shape("qwen3_moe", 48, 8, {
        **_COMMON, "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "moe_intermediate_size": 768, "intermediate_size": 768,
    }),
    "35b": Shape("qwen3_5_moe", 40, 8, {
        **_COMMON, "vocab_size": 248320, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "num_experts": 256, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }, hybrid=True),
    "smollm2-moe": Shape("mixtral", 30, 30, {
        "hidden_size": 576, "num_experts_per_tok": 2, "max_position_embeddings": 8192, "vocab_size": 49152,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "num_local_experts": 8,
        "intermediate_size": 1536, "tie_word_embeddings": True,
    }),
    "tiny": Shape("qwen3_moe", 4, 2, {**_SMALL, "num_experts": 4}, budget=0.004),
    "tiny-hybrid": Shape("qwen3_5_moe", 8, 4, {**_SMALL, "num_experts": 4}, hybrid=True, budget=0.008),
}  # fmt: skip
"""Qwen3-30B-A3B, Qwen3.5-35B-A3B, SmolLM2-135M upcycled, and two small ones that run on a CPU."""


def random_model(config: Any, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model with random weights, made on ``device``."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
    return model.eval()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model under a spec."""

    dense: float
    embedding: float
    """The input embedding, of which a step reads one row a sequence; 0 where it is the head too."""
    experts: float
    """All experts of all layers."""
    num_experts: int
    top_k: int
    token: float
    """K and V of one token."""
    state: float
    """Linear-attention state of one sequence."""

    @property
    def weights(self) -> float:
        """All weights as they are kept."""
        return self.dense + self.embedding + self.experts

    def step(self, batch: int, context: int, hit: float | None = None) -> float:
        """What a decode step of ``batch`` sequences with ``context`` tokens each has to read and write.

        Args:
            batch: sequences.
            context: tokens of each.
            hit: experts of a layer that are read; by default as many as uniform routing would hit on average.
        """
        share = (self.uniform(batch) if hit is None else hit) / self.num_experts
        return self.dense + self.experts * share + batch * (context * self.token + 2 * self.state)

    def uniform(self, tokens: int) -> float:
        """Experts of a layer that ``tokens`` tokens are expected to hit if all are equally popular."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens)

    def fits(self, budget: float, context: int) -> int:
        """Sequences of ``context`` tokens that a budget of bytes holds beside the weights; 0 if it holds none."""
        return max(0, int((budget - self.weights) // (context * self.token + self.state)))


def sizes(name: str, layers: int, spec: Spec, state_dtype: str = "float32") -> Sizes:
    """Bytes of ``layers`` layers of the shape ``name``, with embedding and head, under ``spec``.

    Raises:
        EngineError: no such dtype of states.
    """
    plain = _plain_sizes(name, layers, dtype_of_states(state_dtype).itemsize)
    # Of 16 bits a value, FP4 takes 4 and a share of its block's scale.
    experts = 1.0 if spec.weights is None else (4 + 8 / spec.weights.block) / 16
    kv = 1.0 if spec.kv is None else (4 + 8 / spec.kv.block) / 16
    return replace(plain, experts=experts * plain.experts, token=kv * plain.token)


@lru_cache(maxsize=16)
def _plain_sizes(name: str, layers: int, matrix_bytes: int) -> Sizes:
    """The same in bfloat16, counted from a model without memory."""
    config = SHAPES[name].config(layers)
    model = random_model(config, torch.device("meta"))
    layout = describe(model)
    experts = sum(weight.numel() for _, weight, _ in expert_weights(model, layout))
    embedding = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    dense = sum(p.numel() for p in model.parameters()) - experts - embedding
    values = len(layout.kv_layers) * layout.kv_heads * (layout.head_dim + layout.v_head_dim)
    return Sizes(
        dense=2.0 * dense, embedding=2.0 * embedding, experts=2.0 * experts, num_experts=layout.num_experts,
        top_k=layout.top_k, token=2.0 * values, state=len(layout.linear_layers) * _state_bytes(config, matrix_bytes),
    )  # fmt: skip


def _state_bytes(config: Any, each: int) -> float:
    """State of one gated delta net: ``(heads, key, value)`` of ``each`` bytes, bfloat16 inputs of its convolution."""
    if not hasattr(config, "linear_num_value_heads"):
        return 0.0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return float(each) * values * config.linear_key_head_dim + 2.0 * (2 * keys + values) * config.linear_conv_kernel_dim
