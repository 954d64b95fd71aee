"""Models without a line of their own in this package: what the engine serves is what transformers computes, or refused.

The checked ones come from transformers' own configurations with small sizes, random biases included. Each is decoded
from a prompt in pieces, so linear-attention layers have to take up several tokens where they left off.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tracefp4.errors import ModelError

COMMON: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 2, "num_experts_per_tok": 2, "max_position_embeddings": 512, "initializer_range": 0.125,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
FINE: dict[str, Any] = {"intermediate_size": 128, "moe_intermediate_size": 96}
LOCAL: dict[str, Any] = {"intermediate_size": 96, "num_local_experts": 8}
ROUTED: dict[str, Any] = {**FINE, "n_routed_experts": 8, "n_shared_experts": 1}
MIXED: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}

SERVED: dict[str, dict[str, Any]] = {
    "Qwen2Moe": {**FINE, "shared_expert_intermediate_size": 64, "num_experts": 8},
    "GraniteMoe": LOCAL,
    "Ernie4_5_Moe": {
        **FINE, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
        "num_hidden_layers": 3,
    },
    "Dots1": {**ROUTED, "first_k_dense_replace": 1, "num_hidden_layers": 3, "n_group": 1, "topk_group": 1},
    "FlexOlmo": {"intermediate_size": 96, "num_experts": 8},
    "SolarOpen": ROUTED,
    "ExaoneMoe": {**FINE, "num_experts": 8, "first_k_dense_replace": 1},
    "MiniMaxM2": LOCAL,
    "GraniteMoeHybrid": {
        **LOCAL, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, "mamba_n_heads": 4,
        "mamba_d_head": 32, "mamba_expand": 2,
    },
    "KimiLinear": {
        **FINE, **MIXED, "num_local_experts": 8, "n_shared_experts": 1, "num_key_value_heads": 4, "kv_lora_rank": 64,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "linear_head_dim": 32, "linear_num_heads": 4,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Phimoe": (LOCAL, r"router model\.layers\.0\.mlp\.router \(PhimoeTopKRouter\): none of the 5 known rules"),
    "HunYuanMoEV1": (
        {"intermediate_size": 96, "num_experts": 8, "moe_topk": 2}, r"model\.layers\.0\.mlp: expected one router"
    ),
    "Llama4": (
        {**LOCAL, "intermediate_size_mlp": 96, "attn_temperature_tuning": False, "interleave_moe_layer_step": 1},
        r"model\.layers\.0\.feed_forward\.experts: experts need a gate",
    ),
    "Afmoe": ({**FINE, "num_experts": 8, "num_dense_layers": 1}, r"model\.layers\.1\.mlp: expected one router"),
    "MiniMax": ({**LOCAL, **MIXED, "block_size": 16}, r"layer 0 of the minimax model \(MiniMaxLightningAttention\)"),
    "Jamba": (
        {
            "intermediate_size": 96, "num_experts": 8, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 1, "expert_layer_offset": 0, "use_mamba_kernels": False,
        },
        r"layer 0 of the jamba model \(JambaMambaMixer\)",
    ),
    "Lfm2Moe": (
        {**FINE, "num_experts": 8, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
        r"layer 0 of the lfm2_moe model \(Lfm2MoeShortConv\)",
    ),
}  # fmt: skip


def build(family: str, sizes: dict[str, Any]) -> nn.Module:
    """A random float32 model, the same at every call."""
    model_class = getattr(transformers, f"{family}ForCausalLM", None)
    if model_class is None:
        pytest.skip(f"this transformers ({transformers.__version__}) has no {family}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**COMMON | sizes)).float().eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith("bias") and tensor.is_floating_point():
                    tensor.normal_(std=0.1)
    return model


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("spec", ["bf16", "nvfp4-w4a4-kv4"])
def test_other_families_are_served_as_transformers_computes_them(make_bench, make_request, family, spec):
    model = functools.partial(build, family, SERVED[family])
    bench = make_bench(spec=spec, model=model)
    requests = [make_request("a", 21, temperature=0.0), make_request("b", 5, samples=2)]
    for rollout in bench.engine.generate(requests):
        if spec == "bf16":
            with torch.no_grad():
                logits = model()(input_ids=torch.tensor([rollout.tokens[:-1]]), use_cache=False).logits[0]
            table = torch.log_softmax(logits, -1)
        else:  # transformers with our rounding at the sites, over the whole sequence at once
            table, _ = bench.reference(rollout.tokens)
            assert bench.record(rollout).valid.all()
        table = table[len(rollout.prompt_ids) - 1 :]
        if rollout.request_id == "a":
            assert table.argmax(-1).tolist() == list(rollout.response_ids)
        scores = table.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
        # Float32 alone differs by 4e-6; a code that lay on a boundary may flip.
        tolerance = 2e-5 if spec == "bf16" else 1e-4
        torch.testing.assert_close(torch.tensor(rollout.logprobs), scores, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_it_cannot_serve_are_refused_in_a_sentence(make_bench, family):
    sizes, message = REFUSED[family]
    with pytest.raises(ModelError, match=message):
        make_bench(spec="bf16", model=functools.partial(build, family, sizes))
