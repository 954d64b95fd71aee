"""The engine with kernels gives the tokens and records of the engine without, up to bfloat16 noise."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracefp4.core import Request, SamplingParams
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.frame import decode
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.rollout.embedded import EmbeddedEngine


def build(device, spec):
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        moe_intermediate_size=64, intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    store = MemoryStore()
    plan = Plan.parse("r4-all+mid") if spec.activations is not None else None
    engine = EmbeddedEngine(
        model, None, spec, plan, store, device=device, max_tokens=128, max_batch=4, prefill_chunk=32, cuda_graphs=True
    )
    return engine, store


QUICK = [] if torch.cuda.is_available() else [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "name", ["bf16", *(pytest.param(name, marks=QUICK) for name in ("nvfp4-w4a4-kv4", "mxfp4-w4a4-kv4"))]
)
def test_engine_with_and_without_kernels(name, device, monkeypatch):
    request = Request("a", tuple(range(3, 22)), 1, SamplingParams(max_new_tokens=3, seed=1, temperature=0.0))
    engine, store = build(device, get_spec(name))
    assert engine.pool.for_kernels
    with_kernels = engine.generate([request])[0]
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    plain, plain_store = build(device, get_spec(name))
    assert not plain.pool.for_kernels
    without = plain.generate([request])[0]
    assert with_kernels.response_ids[0] == without.response_ids[0]
    assert abs(with_kernels.logprobs[0] - without.logprobs[0]) < 0.1
    if name == "bf16":
        return
    found, expected = decode(store.get(with_kernels.guidance)), decode(plain_store.get(without.guidance))
    assert found.valid.all() and expected.valid.all()
    for site, record in expected.sites.items():
        # One layer: its inputs are computed by the same code, so they are equal; what follows attention is nearly so.
        same = (found.sites[site].planes[:19] == record.planes[:19]).float().mean()
        assert same == 1.0 if site.kind in ("k", "v") else same > 0.9
