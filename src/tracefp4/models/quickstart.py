"""The model of the quickstart: a Qwen3-MoE small enough to learn by reinforcement on a laptop.

0.8 million parameters: 4 layers, hidden size 96, 8 experts of which a token uses 2, bytes as tokens, 256 tokens
of context. Everything that FP4 touches is there in its real proportions: expert inputs of 96 values (6 blocks), expert
intermediates of 64, keys and values of 32 a head with two query heads a KV head, q/k norms, a renormalising router. It
is random; a supervised warm start of a minute gives it its first accuracy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tracefp4.models.tiny import tiny_model
from tracefp4.models.tokenizer import VOCAB_SIZE, byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

from tracefp4.models.directory import LoadedModel

MAX_LENGTH = 256
_HIDDEN = 96


def tiny_moe(
    seed: int = 0, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Build the model; the same seed gives the same weights.

    Args:
        seed: seed of the initialisation.
        dtype: dtype of the parameters.
        device: where the model goes.
    """
    return tiny_model(
        "qwen3_moe",
        seed,
        dtype=dtype,
        device=device,
        vocab_size=VOCAB_SIZE,
        hidden_size=_HIDDEN,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=_HIDDEN**-0.5,
    )


def load(seed: int = 0, *, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    """The model with its tokenizer, under the name ``tiny-moe``."""
    note = f"Random weights, seed {seed}: a small Qwen3-MoE for the quickstart, untrained."
    return LoadedModel(tiny_moe(seed, dtype=dtype), byte_tokenizer(MAX_LENGTH), {"name": "tiny-moe", "notes": [note]})
