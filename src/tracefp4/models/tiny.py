"""Tiny random models of every supported family, for tests, examples and ``tiny:<family>``.

Each is the real transformers class with small dimensions: hidden size 64, two to four layers, four to eight experts of
which a token uses two. All widths that a number format cuts into blocks are multiples of 32, so NVFP4 (blocks of 16)
and MXFP4 (blocks of 32) both fit, and the widths differ from each other, so that a swapped axis shows.

Transformers initialises with a standard deviation of 0.02, which with 64 inputs would give activations near zero and a
router that cannot choose. Here it is ``1 / sqrt(64)``: every linear layer keeps the variance of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tracefp4.errors import ModelError, suggest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HIDDEN = 64
INTERMEDIATE = 96
VOCAB = 288
"""256 bytes and room for special tokens."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "initializer_range": HIDDEN**-0.5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_GQA: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_LINEAR: dict[str, Any] = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 64,
}
_FINE: dict[str, Any] = {"moe_intermediate_size": INTERMEDIATE, "intermediate_size": 128}
_SIGMOID: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
}
_LATENT: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_GQA, **_FINE, "num_experts": 8, "num_hidden_layers": 2, "norm_topk_prob": True},
    "qwen3_5_moe": {**_GQA, **_LINEAR, "moe_intermediate_size": INTERMEDIATE, "num_experts": 8},
    "qwen3_next": {**_GQA, **_LINEAR, **_FINE, "num_experts": 8, "norm_topk_prob": True},
    "gpt_oss": {
        **_GQA,
        "intermediate_size": INTERMEDIATE,
        "num_local_experts": 8,
        "num_hidden_layers": 2,
        "sliding_window": 8,
        "max_position_embeddings": 131072,
    },
    "olmoe": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": INTERMEDIATE,
        "num_experts": 8,
        "num_hidden_layers": 2,
    },
    "mixtral": {**_GQA, "intermediate_size": INTERMEDIATE, "num_local_experts": 4, "num_hidden_layers": 2},
    "deepseek_v3": {**_LATENT, **_FINE, **_SIGMOID},
    "glm4_moe": {**_GQA, **_FINE, **_SIGMOID, "use_qk_norm": True},
}

FAMILIES: tuple[str, ...] = tuple(_SETTINGS)
"""Names that :func:`tiny_model` accepts."""


def _classes(family: str) -> tuple[Callable[..., PretrainedConfig], Callable[..., PreTrainedModel]]:
    import transformers

    stems = {
        "qwen3_moe": "Qwen3Moe",
        "qwen3_5_moe": "Qwen3_5Moe",
        "qwen3_next": "Qwen3Next",
        "gpt_oss": "GptOss",
        "olmoe": "Olmoe",
        "mixtral": "Mixtral",
        "deepseek_v3": "DeepseekV3",
        "glm4_moe": "Glm4Moe",
    }
    stem = stems[family]
    config = stem + ("TextConfig" if family == "qwen3_5_moe" else "Config")
    return getattr(transformers, config), getattr(transformers, stem + "ForCausalLM")


def tiny_config(family: str, **overrides: object) -> PretrainedConfig:
    """Return the configuration of a tiny model.

    Args:
        family: one of :data:`FAMILIES`.
        **overrides: configuration fields to replace, under the family's own names.

    Raises:
        ModelError: for an unknown family.
    """
    if family not in _SETTINGS:
        raise ModelError(f"unknown tiny model {family!r}{suggest(family, FAMILIES)}")
    config_class, _ = _classes(family)
    return config_class(**{**_COMMON, **_SETTINGS[family], **overrides})


def tiny_model(
    family: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    **overrides: object,
) -> PreTrainedModel:
    """Build a tiny random causal language model, in evaluation mode. The same seed gives the same weights.

    Args:
        family: one of :data:`FAMILIES`.
        seed: seed of the initialisation; the global random state is left as it was.
        dtype: dtype of the parameters. As in ``from_pretrained``, buffers (rotary frequencies, the routers' correction
            bias) and parameters that the class keeps in float32 stay float32.
        device: where the model is moved after initialisation on the CPU.
        **overrides: see :func:`tiny_config`.

    Raises:
        ModelError: for an unknown family.
    """
    config = tiny_config(family, **overrides)
    _, model_class = _classes(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        _randomise_constants(model)
    keep = tuple(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        if not any(part in name for part in keep):
            parameter.data = parameter.data.to(dtype)
    nn.Module.to(model, device)
    return model.eval()


def _randomise_constants(model: nn.Module) -> None:
    """Give biases that transformers initialises to zero a value, so that a forgotten bias shows in a test."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("_bias", ".bias")):
                tensor.normal_(std=0.1)
