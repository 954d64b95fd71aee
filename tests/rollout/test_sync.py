"""New weights: versions, checksums, and what happens when a sync fails."""

from __future__ import annotations

import weakref

import pytest
import torch

from tracefp4.errors import SyncError
from tracefp4.formats.blocks import quantize_weight
from tracefp4.models.packing import model_digest
from tracefp4.models.tiny import FAMILIES, tiny_model


def weights(family: str, seed: int, dtype: torch.dtype = torch.bfloat16, **options) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in tiny_model(family, seed=seed, dtype=dtype, **options).named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["nvfp4-w4a4-kv4", "nvfp4-w4a4-kv4/b1", "bf16"])
def test_digest_is_the_trainers_if_and_only_if_the_weights_are(make_bench, family, spec):
    bench = make_bench(family, spec, dtype=torch.bfloat16)
    layout, deployed = bench.reference.layout, bench.reference.spec
    trainer = tiny_model(family, seed=9)

    def mine(model, first=deployed.bf16_layers):
        return model_digest(model, layout, deployed.weights, first=first)

    before = bench.engine.digest()
    assert before == mine(bench.reference.model)
    digest = bench.engine.sync(dict(trainer.named_parameters()), 1)
    assert digest == bench.engine.digest() == mine(trainer) != before
    # Another number of layers in bfloat16 is another deployment of the same weights.
    if spec != "bf16" and 0 in layout.moe_layers:
        assert digest != mine(trainer, 1 - deployed.bf16_layers)
    for name, parameter in trainer.named_parameters():
        if "router" in name or "q_proj" in name or "down_proj" in name:
            with torch.no_grad():
                parameter.view(-1)[0] += 1.0
            assert bench.engine.digest() != mine(trainer)
            break


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_sync_makes_the_engine_one_of_the_new_weights(make_bench, make_request, family):
    requests = [make_request("a", 9, samples=2)]
    bench = make_bench(family)
    old = bench.engine.generate(requests)
    state = weights(family, 9, torch.float32)
    bench.engine.sync(state, 7)
    new = bench.engine.generate(requests)
    fresh = make_bench(family, model_options={"seed": 9}).engine.generate(requests)
    assert [r.weight_version for r in old + new] == [0, 0, 7, 7] and bench.engine.weight_version == 7
    for one, other, before in zip(new, fresh, old, strict=True):
        assert one.response_ids == other.response_ids != before.response_ids
        assert one.logprobs == other.logprobs
    bench.engine.sync(weights(family, 3, torch.float32), 8)
    assert [r.logprobs for r in bench.engine.generate(requests)] == [r.logprobs for r in old]


def test_parameters_hold_exact_operands(make_bench):
    bench = make_bench("gpt_oss", dtype=torch.bfloat16)
    layout, numerics = bench.reference.layout, bench.reference.spec.weights
    name = layout.experts[1] + ".gate_up_proj"
    original = dict(bench.reference.model.named_parameters())[name]
    q = quantize_weight(original.detach().transpose(1, 2).contiguous(), numerics)
    held = dict(bench.engine.model.named_parameters())[name]
    assert torch.equal(held.transpose(1, 2), q.operand())
    packed = bench.engine._weights.packed(name)
    assert torch.equal(packed.scales, q.scales) and packed.codes.numel() * 2 == q.codes.numel()
    with pytest.raises(SyncError, match="no quantized weight"):
        bench.engine._weights.packed("lm_head.weight")


def drop(state):
    del state["model.layers.1.mlp.experts.down_proj"]


def add(state):
    state["model.layers.1.mlp.experts.down_proj2"] = torch.zeros(1)


def cut(state):
    state["lm_head.weight"] = state["lm_head.weight"][1:]


def widen(state):
    state["lm_head.weight"] = state["lm_head.weight"].float()


BROKEN = {
    "1 of 25 parameters are missing": drop,
    r"no parameter .*down_proj2' \(did you mean .*down_proj'": add,
    r"'lm_head.weight' has shape \(287, 64\)": cut,
    "'lm_head.weight' is torch.float32, the engine computes in torch.bfloat16": widen,
}


@pytest.mark.parametrize("message", BROKEN)
def test_after_a_failed_sync_the_engine_serves_nothing(make_bench, make_request, message):
    bench = make_bench(dtype=torch.bfloat16)
    state = weights("qwen3_moe", 9)
    BROKEN[message](state)
    with pytest.raises(SyncError, match=message):
        bench.engine.sync(state, 1)
    for refused in (
        lambda: bench.engine.generate([make_request("a", 4)]),
        lambda: bench.engine.add(make_request("a", 4)),
        bench.engine.step,
        bench.engine.digest,
        lambda: bench.engine.weight_version,
    ):
        with pytest.raises(SyncError, match="sync again"):
            refused()
    bench.engine.sync(weights("qwen3_moe", 9), 2)
    assert len(bench.engine.generate([make_request("a", 4)])) == 1


def test_an_error_half_way_is_no_success(make_bench):
    """A mapping that fails while it is read, as a checkpoint on a full disk or a broken connection does."""

    class Breaks(dict):
        def __getitem__(self, name):
            if name == "model.norm.weight":
                raise OSError("connection lost")
            return super().__getitem__(name)

    bench = make_bench(dtype=torch.bfloat16)
    with pytest.raises(OSError, match="connection lost"):
        bench.engine.sync(Breaks(weights("qwen3_moe", 9)), 1)
    with pytest.raises(SyncError, match="sync again"):
        _ = bench.engine.weight_version


def test_a_sync_holds_one_weight_after_the_other(make_bench):
    """A mapping that reads tensors when they are asked for: no more than the last one and the next live at once."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []

    class Lazy(dict):
        def __getitem__(self, name):
            tensor = super().__getitem__(name).clone()
            made.append(weakref.ref(tensor))
            alive.append(sum(ref() is not None for ref in made))
            return tensor

    bench = make_bench(dtype=torch.bfloat16)
    bench.engine.sync(Lazy(weights("qwen3_moe", 9)), 1)
    assert len(made) == 25 and max(alive) <= 2
    assert bench.engine.digest() == make_bench(dtype=torch.bfloat16, model_options={"seed": 9}).engine.digest()


def test_requests_in_flight_forbid_a_sync(make_bench, make_request):
    bench = make_bench(dtype=torch.bfloat16)
    bench.engine.add(make_request("a", 4))
    with pytest.raises(SyncError, match="1 requests are in flight"):
        bench.engine.sync(weights("qwen3_moe", 9), 1)
    assert bench.engine.weight_version == 0
    bench.engine.abort("a")
    bench.engine.sync(weights("qwen3_moe", 9), 1)


def test_a_state_dict_is_accepted_with_tied_names_and_buffers(make_bench):
    tied = make_bench(dtype=torch.bfloat16, model_options={"tie_word_embeddings": True})
    state = tiny_model("qwen3_moe", seed=9, tie_word_embeddings=True).state_dict()
    assert "lm_head.weight" in state
    tied.engine.sync(state, 1)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(SyncError, match="tied to another parameter"):
        tied.engine.sync(state, 2)
    bench = make_bench("deepseek_v3", dtype=torch.bfloat16)
    state = tiny_model("deepseek_v3", seed=9).state_dict()
    name = next(n for n in state if n.endswith("e_score_correction_bias"))
    state[name] = state[name] + 1
    bench.engine.sync(state, 1)
    assert torch.equal(dict(bench.engine.model.named_buffers())[name], state[name])
