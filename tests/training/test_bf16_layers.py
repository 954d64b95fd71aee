"""Layers that the spec leaves in bfloat16: nothing is rounded there, nothing recorded, and both sides know it."""

from __future__ import annotations

import copy

import pytest
import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.errors import CoverageError, EngineError, GuidanceMismatch
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.frame import Expectation, decode
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.models.binding import bound
from tracefp4.models.coverage import compare, coverage, probe
from tracefp4.models.layout import describe
from tracefp4.models.packing import PackedState, model_digest
from tracefp4.models.tiny import FAMILIES, tiny_model
from tracefp4.rollout.embedded import EmbeddedEngine
from tracefp4.training.batch import Example, collate
from tracefp4.training.policy import recompute_layers, token_logprobs
from tracefp4.training.sites import TrainerSites
from tracefp4.training.weights import WeightOperands

FP4 = "nvfp4-w4a4-kv4"
CPU = torch.device("cpu")


def _states(model: torch.nn.Module, sites: TrainerSites) -> tuple[torch.Tensor, ...]:
    """Hidden states after each layer."""
    ids = torch.arange(3, 20)[None]
    with bound(model, sites), torch.no_grad():
        return model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layers_are_those_of_bfloat16_and_the_others_are_not(family: str) -> None:
    model = tiny_model(family)
    layout = describe(model)
    plain, part, whole = (_states(model, TrainerSites(layout, get_spec(name))) for name in ("bf16", f"{FP4}/b1", FP4))
    assert torch.equal(plain[1], part[1]) and not torch.equal(plain[-1], part[-1])
    if layout.experts.get(0) or layout.attentions.get(0):
        assert not torch.equal(part[1], whole[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_say_which_layers_they_quantize(family: str) -> None:
    model = tiny_model(family)
    layout, spec = describe(model), get_spec(f"{FP4}/b1")
    engine = EmbeddedEngine(copy.deepcopy(model), None, spec, max_tokens=64, page_size=4, max_batch=2)
    with bound(model, TrainerSites(layout, spec), spec=spec):
        with probe(model) as calls, torch.no_grad():
            model(input_ids=torch.arange(3, 11)[None], use_cache=False)
        mine = coverage(model, spec, calls)
    compare(engine.coverage(), mine)
    assert {row.format for row in mine.rows if row.layer == 0} <= {"bf16"}
    assert {row.format for row in mine.rows if row.layer == 1 and row.kind != "routes"} != {"bf16"}
    if layout.experts.get(0) or layout.attentions.get(0):
        model = tiny_model(family)
        with bound(model, TrainerSites(layout, get_spec(FP4))), pytest.raises(CoverageError, match="layers.0"):
            compare(engine.coverage(), coverage(model, get_spec(FP4)))


@pytest.mark.parametrize("plan", ["r1-all+mid", "c1-all/s2"])
def test_frames_hold_the_other_layers_and_name_the_deployment(plan: str) -> None:
    model, spec, store = tiny_model("qwen3_moe"), get_spec(f"{FP4}/b1"), MemoryStore()
    engine = EmbeddedEngine(
        copy.deepcopy(model), None, spec, Plan.parse(plan), store, max_tokens=64, page_size=4, max_batch=2
    )
    (rollout,) = engine.generate([Request("a", (3, 4, 5), 1, SamplingParams(max_new_tokens=9))])
    assert rollout.guidance is not None
    data, layout = store.get(rollout.guidance), describe(model)
    chosen = Plan.parse(plan).select(layout.recordable_shapes(spec), layout.num_layers)
    record = decode(data, Expectation(tokens=rollout.tokens, plan=str(Plan.parse(plan)), shapes=chosen,
                                      numerics_hash=spec.hash, weight_version=0, max_lag=0))  # fmt: skip
    assert {site.layer for site in record.sites} == {1} and record.numerics_hash == spec.hash
    for other in (FP4, f"{FP4}/b2"):
        with pytest.raises(GuidanceMismatch, match="numerics"):
            decode(data, Expectation(numerics_hash=get_spec(other).hash))
    sites = TrainerSites(layout, spec)
    example = Example(rollout.tokens, len(rollout.prompt_ids), rollout_logprobs=rollout.logprobs, routes=rollout.routes)
    batch = collate([example], CPU)
    with bound(model, sites), torch.no_grad(), sites.batch(batch):
        delta = (token_logprobs(model, batch)[0] - batch.rollout_logprobs)[batch.response]
    assert float(delta.abs().max()) < 0.5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_packed_sync_packs_the_other_layers(family: str) -> None:
    model, spec = tiny_model(family, seed=5), get_spec(f"{FP4}/b1")
    layout = describe(model)
    engine = EmbeddedEngine(tiny_model(family, seed=6), None, spec, max_tokens=64, page_size=4, max_batch=2)
    parameters = dict(model.named_parameters())
    assert spec.weights is not None
    state = PackedState(model, layout, spec.weights, parameters, spec.bf16_layers)
    mine = model_digest(model, layout, spec.weights, first=1)
    assert engine.sync(state, 1) == mine == engine.sync(parameters, 2)
    served = dict(engine.model.named_parameters())
    for layer, path in layout.experts.items():
        same = torch.equal(served[f"{path}.down_proj"], parameters[f"{path}.down_proj"])
        assert same == (layer == 0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_no_form_of_weights_changes_a_gradient(family: str, recompute: bool) -> None:
    spec, found = get_spec(f"{FP4}/b1"), []
    for cache, managed in (("widened", False), ("packed", False), ("widened", True), ("packed", True)):
        model = tiny_model(family)
        sites = TrainerSites(describe(model), spec, weights=WeightOperands(spec.weights, cache))  # type: ignore[arg-type]
        if managed:
            sites.weights.manage()
        if recompute:
            recompute_layers(model)
            model.train()
        gradients = []
        with bound(model, sites):
            for _ in range(2):
                batch = collate([Example(tuple(range(3, 20)), 5)], CPU)
                with sites.batch(batch):
                    token_logprobs(model, batch)[0].sum().backward()
                gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.01)
                sites.weights.renew()
                assert managed or sites.weights.stale()
        found.append(gradients)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_sites_of_several_depths_may_share_their_weights() -> None:
    model = tiny_model("qwen3_moe")
    layout, before = describe(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    shared = WeightOperands(get_spec(FP4).weights)
    for name in (f"{FP4}/b1", FP4, f"{FP4}/b1", FP4):
        found = _states(model, TrainerSites(layout, get_spec(name), weights=shared))
        assert torch.equal(found[-1], _states(model, TrainerSites(layout, get_spec(name)))[-1])
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_engines_of_other_packages_refuse_such_a_spec() -> None:
    from tracefp4.config import EngineConfig
    from tracefp4.integrations.engines.hosted import HostedEngine
    from tracefp4.integrations.engines.settings import dump_spec, load_spec

    spec = get_spec(f"{FP4}/b1")
    with pytest.raises(EngineError, match="leaves 1 of them in bfloat16, which engine 'embedded' can"):
        HostedEngine(tiny_model("qwen3_moe"), None, spec, None, None, EngineConfig())
    assert load_spec(dump_spec(spec)) == spec
