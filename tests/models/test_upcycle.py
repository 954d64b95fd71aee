"""Upcycling: the copy keeps the function, the split makes experts differ, the gate tells one from the other."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tracefp4.errors import ModelError
from tracefp4.models.gate import expert_distance, router_gate, router_report
from tracefp4.models.layout import describe
from tracefp4.models.split import make_router, plan_split
from tracefp4.models.tiny import tiny_model
from tracefp4.models.upcycle import LayerSplit, break_symmetry, uniform, upcycle

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.125,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def dense(tied=True, **overrides):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": tied, **overrides})).eval()


def text(batch=8, length=32, seed=0):
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def learned():
    """A dense model that has learned that a token is followed by three times itself plus one, and text of that kind."""
    model = dense(tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def sample(seed):
        start = torch.randint(0, 64, (16, 1), generator=torch.Generator().manual_seed(seed))
        rows = [start]
        for _ in range(15):
            rows.append((3 * rows[-1] + 1) % 64)
        return torch.cat(rows, 1)

    model.train()
    for step in range(80):
        tokens = sample(step)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), sample(1000)


@torch.no_grad()
def logits(model, tokens):
    return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (8, 3)])
def test_copy_computes_what_the_dense_model_computes(tied, experts, top_k):
    model, tokens = dense(tied), text()
    moe = upcycle(model, experts, top_k)
    assert describe(moe).num_experts == experts and describe(moe).top_k == top_k
    assert (logits(moe, tokens) - logits(model, tokens)).abs().max() < 2e-5
    assert (moe.lm_head.weight is moe.model.embed_tokens.weight) == tied


def test_copy_keeps_scaled_rotary_embeddings_and_bfloat16():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    model, tokens = dense(rope_parameters=rope), text()
    assert (logits(upcycle(model, 4, 2), tokens) - logits(model, tokens)).abs().max() < 2e-5
    half = dense().to(torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in upcycle(half, 4, 2).parameters())


def test_copy_generates_the_same_text():
    model, tokens = dense(), text(2, 8)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens, **options), upcycle(model, 4, 2).generate(tokens, **options))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: (dense(), 2, 2), "2 experts"),
        (lambda: (dense(), 4, 1), "1 of 4"),
        (lambda: (dense(), 4, 4), "4 of 4"),
        (lambda: (dense(mlp_bias=True), 4, 2), "biases"),
        (lambda: (dense(hidden_act="gelu"), 4, 2), "'gelu'"),
        (lambda: (Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)), 4, 2), "family 'qwen3'"),
        (lambda: (tiny_model("mixtral"), 4, 2), "family 'mixtral'"),
    ],
)
def test_what_would_not_keep_the_function_is_refused(build, message):
    with pytest.raises(ModelError, match=message):
        upcycle(*build())


def test_uniform_values_have_the_deviation_asked_for_and_depend_on_the_seed_only():
    values = uniform((200, 500), 0.25, torch.Generator().manual_seed(1))
    assert abs(float(values.std()) - 0.25) < 1e-3 and abs(float(values.mean())) < 2e-3
    assert torch.equal(values, uniform((200, 500), 0.25, torch.Generator().manual_seed(1)))
    # The first bits of this seed, so that another machine or release that draws other values shows.
    assert [float(v) for v in values[0, :3]] == pytest.approx(FIRST, abs=0)


FIRST = [0.3929133117198944, 0.0031120143830776215, -0.272159218788147]


def test_router_spreads_tokens_evenly_and_by_content():
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(4, 32, generator=generator, dtype=torch.float64)
    which = torch.arange(400) % 4
    noise = torch.randn(400, 32, generator=generator, dtype=torch.float64)
    x = 3.0 + 2 * groups[which] + 0.3 * noise  # a large common part, as hidden states have
    router = make_router(x, 4, 2, torch.Generator().manual_seed(0))
    chosen = (x @ router.T).topk(2, -1).indices
    load = torch.bincount(chosen.flatten(), minlength=4) / chosen.numel()
    assert load.max() < 0.3 and load.min() > 0.2
    favourites = [chosen[which == group, 0] for group in range(4)]
    assert all((first == first[0]).all() for first in favourites)
    assert sorted(int(first[0]) for first in favourites) == [0, 1, 2, 3]
    assert (x @ router.T).std(0) == pytest.approx([1.0] * 4, rel=0.05)


def test_split_is_deterministic_and_of_the_right_shape():
    model, tokens = dense(), text()
    parts = plan_split(model, tokens, 4, 2, fraction=0.25, seed=3)
    again = plan_split(model, tokens, 4, 2, fraction=0.25, seed=3)
    assert [tuple(p.router.shape) for p in parts] == [(4, 64)] * 2
    assert [tuple(p.fresh.shape) for p in parts] == [(4, 32)] * 2
    for a, b in zip(parts, again, strict=True):
        assert torch.equal(a.router, b.router) and torch.equal(a.fresh, b.fresh)
        assert torch.equal(a.router, a.router.bfloat16().float())  # the router that sent the tokens is the one kept
    other = plan_split(model, tokens, 4, 2, fraction=0.25, seed=4)
    assert not torch.equal(parts[0].router, other[0].router)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_fresh_channels_are_silent_and_learn():
    model, tokens = dense(), text()
    moe = upcycle(model, 4, 2)
    parts = plan_split(model, tokens, 4, 2)
    break_symmetry(moe, parts, seed=1)
    experts, fresh = moe.model.layers[0].mlp.experts, parts[0].fresh[2]
    gate = model.model.layers[0].mlp.gate_proj.weight.detach()
    kept = torch.ones(128, dtype=torch.bool)
    kept[fresh] = False
    assert (experts.down_proj[2][:, fresh] == 0).all()
    assert torch.equal(experts.gate_up_proj[2][:128][kept], gate[kept])
    assert abs(float(experts.gate_up_proj.detach()[2, fresh].std() / gate.std()) - 1) < 0.1
    moe(tokens, labels=tokens).loss.backward()
    assert experts.down_proj.grad[2][:, fresh].abs().sum() > 0


def test_result_depends_on_the_seed_only():
    model = dense()
    parts = plan_split(model, text(), 4, 2)

    def weights(seed):
        moe = upcycle(model, 4, 2)
        break_symmetry(moe, parts, seed=seed)
        return moe.model.layers[1].mlp.experts.gate_up_proj

    torch.manual_seed(1)
    first = weights(7)
    torch.manual_seed(2)
    assert torch.equal(first, weights(7))
    assert not torch.equal(first, weights(8))


@pytest.mark.parametrize(
    ("tokens", "fraction", "message"),
    [(text(1, 16), 0.25, "16 calibration tokens"), (text(), 0.0, "fraction 0.0"), (text(), 1.0, "fraction 1.0")],
)
def test_impossible_splits_are_refused(tokens, fraction, message):
    with pytest.raises(ModelError, match=message):
        plan_split(dense(), tokens, 4, 2, fraction=fraction)


def test_a_split_of_another_model_is_refused():
    moe = upcycle(dense(), 4, 2)
    part = LayerSplit(torch.zeros(8, 64), torch.zeros(8, 4, dtype=torch.int64))
    with pytest.raises(ModelError, match="1 layers, the model 2"):
        break_symmetry(moe, [part])
    with pytest.raises(ModelError, match="layer 0"):
        break_symmetry(moe, [part, part])


def test_gate_refuses_equal_experts(learned):
    model, tokens = learned
    with pytest.raises(ModelError, match="identical experts are no MoE"):
        router_gate(upcycle(model, 4, 2), tokens)


def test_gate_passes_a_split_model_and_foreign_routes_cost(learned):
    model, tokens = learned
    moe = upcycle(model, 4, 2)
    break_symmetry(moe, plan_split(model, tokens, 4, 2, fraction=0.5))
    report = router_gate(moe, tokens)
    assert report.rise > 0.02 and report.loss_permuted == pytest.approx(report.loss + report.rise)
    assert min(report.balance) > 0.9 and min(report.gradient) > 0 and min(report.dissimilarity) > 0.3
    assert report.layers == (0, 1) and all(sum(load) == pytest.approx(1) for load in report.load)
    plain = torch.nn.functional.cross_entropy(logits(moe, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert report.loss == pytest.approx(float(plain), abs=1e-5)
    assert f"raise the loss from {report.loss:.3f} to {report.loss_permuted:.3f} nats" in str(report)


def test_gate_refuses_a_router_that_uses_few_experts(learned):
    model, tokens = learned
    moe = upcycle(model, 4, 2)
    break_symmetry(moe, plan_split(model, tokens, 4, 2))
    with torch.no_grad():
        moe.model.layers[1].mlp.gate.weight[2:] = -10 * moe.model.layers[1].mlp.gate.weight[:2]
    with pytest.raises(ModelError, match="layer 1 uses few experts"):
        router_gate(moe, tokens, min_balance=0.99)


def test_gate_scores_what_it_is_told_to_and_ignores_padding(learned):
    model, tokens = learned
    moe = upcycle(model, 4, 2)
    break_symmetry(moe, plan_split(model, tokens, 4, 2, fraction=0.5))
    # Prompts of another rule, of which the model knows nothing; only what follows them counts.
    length, prompt = tokens.shape[1], 12
    rows = torch.cat([text(len(tokens), prompt, seed=3), tokens, text(len(tokens), 5)], dim=1)
    scored = torch.arange(rows.shape[1]).expand_as(rows) > prompt
    lengths = torch.full((len(rows),), prompt + length)
    report = router_gate(moe, rows, lengths=lengths, scored=scored)
    assert report.tokens == len(tokens) * (length - 1) and report.rise > 0.02
    assert report.loss < router_report(moe, rows).loss - 1
    rows[:, prompt + length :] = 0
    assert router_report(moe, rows, lengths=lengths, scored=scored).loss_permuted == report.loss_permuted
    with pytest.raises(ModelError, match="no token counts"):
        router_report(moe, rows, lengths=lengths, scored=scored & False)


def test_gate_refuses_routes_without_information():
    with pytest.raises(ModelError, match="routes carry no information"):
        router_gate(tiny_model("qwen3_moe", dtype=torch.float32), text())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_report_measures_every_family_and_leaves_the_model_as_it_was(family):
    model = tiny_model(family, dtype=torch.float32).train()
    model.get_parameter("model.embed_tokens.weight").requires_grad_(False)
    report = router_report(model, text(2, 16))
    assert len(report.gradient) == len(describe(model).moe_layers) and min(report.gradient) > 0
    assert report.dissimilarity == pytest.approx([2**0.5] * len(report.layers), rel=0.05)
    assert model.training and all(p.grad is None for p in model.parameters())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]
    assert not any(module._forward_hooks for module in model.modules())


def test_report_refuses_a_dense_model_and_short_text():
    with pytest.raises(ModelError, match="no MoE layer"):
        router_report(dense(), text())
    with pytest.raises(ModelError, match="expected \\(B, S\\)"):
        router_report(upcycle(dense(), 4, 2), text(4, 1))


def test_distance_of_near_equal_experts_is_resolved():
    moe = upcycle(dense(), 4, 2)
    experts = moe.model.layers[0].mlp.experts
    assert expert_distance(experts) == pytest.approx(0, abs=1e-7)
    with torch.no_grad():
        for expert in range(4):
            experts.down_proj[expert] *= 1 + 1e-4 * expert
    down, gate_up = float(experts.down_proj.detach()[0].norm()), float(experts.gate_up_proj.detach()[0].norm())
    assert expert_distance(experts) == pytest.approx(1e-4 * down / math.hypot(down, gate_up), rel=0.01)
