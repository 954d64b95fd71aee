"""Decode steps with compiled layers: the same seams are reached, and one compiled graph serves the layers of a kind."""

from __future__ import annotations

import pytest
import torch

from tracefp4.models.key_basis import KeyBasis, random_signs, set_basis
from tracefp4.models.layout import describe
from tracefp4.models.tiny import FAMILIES, tiny_model


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def logprob_gap(one, other):
    pairs = zip(one, other, strict=True)
    return max(abs(p - q) for a, b in pairs for p, q in zip(a.logprobs, b.logprobs, strict=True))


def turned_model():
    model = tiny_model("qwen3_moe", seed=3, dtype=torch.float32)
    for layer, path in describe(model).attentions.items():
        module = model.get_submodule(path)
        centre = torch.full((module.config.num_key_value_heads, 1, module.head_dim), 0.1 * layer)
        set_basis(module, KeyBasis(centre, random_signs(module.head_dim)))
    return model


@pytest.mark.parametrize("family", [*FAMILIES, "keys in another basis"])
def test_traced_layers_change_nothing(make_bench, make_request, family):
    requests = [make_request("a", 21, samples=2), make_request("b", 5)]
    made = {"model": turned_model} if family not in FAMILIES else {"family": family}
    plain, traced = make_bench(**made), make_bench(**made, compile_decode="eager")
    expected, found = plain.engine.generate(requests), traced.engine.generate(requests)
    assert [r.response_ids for r in expected] == [r.response_ids for r in found]
    assert logprob_gap(expected, found) == 0
    for one, other in zip(expected, found, strict=True):
        a, b = plain.record(one), traced.record(other)
        assert a.valid.all() and b.valid.all() and torch.equal(one.routes, other.routes)
        for site, record in a.sites.items():
            assert torch.equal(record.planes, b.sites[site].planes) and torch.equal(record.scales, b.sites[site].scales)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_layers_share_one_graph(make_bench, make_request):
    bench = make_bench("qwen3_moe", compile_decode="eager")
    assert bench.engine.layout.num_layers > 1
    # A batch of one is a shape of its own for the compiler, so the batch stays at two.
    bench.engine.generate([make_request("a", 9, samples=2, max_new_tokens=4)])
    # One for the layers, and one each for the angles, the last norm and the sampler.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_gated_delta_nets_share_one_graph(make_bench, make_request, family):
    products = []

    def counting(module, _):
        products.append(sum("linear" in str(node.target) for node in module.graph.nodes if node.op == "call_function"))
        return module.forward

    options = {"num_hidden_layers": 5, "layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2}
    bench = make_bench(family, "bf16", compile_decode=counting, model_options=options)
    bench.engine.generate([make_request("a", 9, samples=2, max_new_tokens=4)])
    # One for each kind of layer, and one each for the angles, the last norm and the sampler.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 5
    # What goes in, what comes out, the router, and a shared expert with its gate; what is around them has no product.
    assert products == [0, 7, 7, 0, 0]


def test_a_compiled_engine_takes_new_weights(make_bench, make_request):
    from tracefp4.models.tiny import tiny_model

    requests = [make_request("a", 9, samples=2)]
    bench = make_bench(compile_decode="eager")
    bench.engine.generate(requests)
    bench.engine.sync(dict(tiny_model("qwen3_moe", seed=9, dtype=torch.float32).named_parameters()), 1)
    fresh = make_bench(model_options={"seed": 9})
    assert logprob_gap(bench.engine.generate(requests), fresh.engine.generate(requests)) == 0


class Graphs:
    """A backend that keeps what the compiler would be given, and runs it as it is."""

    def __init__(self):
        self.products = []

    def __call__(self, module, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph, _):
            names = [str(node.target) for node in graph.graph.nodes]
            self.products.append(sum("mm." in name or "mm_" in name for name in names))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep, inference_compiler=keep)(module, inputs)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_one_product_makes_q_k_and_v(make_bench, make_request, family):
    """A layer has products for Q, K and V, for the output, and for the router; experts are not traced."""
    graphs, requests = Graphs(), [make_request("a", 9, samples=2, max_new_tokens=4)]
    bench = make_bench(family, compile_decode=graphs)
    expected = make_bench(family).engine.generate(requests)
    found = bench.engine.generate(requests)
    assert [r.response_ids for r in expected] == [r.response_ids for r in found]
    assert logprob_gap(expected, found) < 1e-4
    assert {count for count in graphs.products if count} == {3}  # the sampler has none


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_joined_weights_are_the_same_model_in_the_same_memory(make_bench, make_request, family):
    from tracefp4.models.tiny import tiny_model

    plain, joined = make_bench(family), make_bench(family, compile_decode="eager")
    before, after = plain.engine.model.state_dict(), joined.engine.model.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert plain.engine.weight_bytes == joined.engine.weight_bytes
    assert plain.engine.digest() == joined.engine.digest()
    attention = joined.engine.model.get_submodule(joined.engine.layout.attentions[0])
    parts = attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    state = dict(tiny_model(family, seed=9, dtype=torch.float32).named_parameters())
    assert plain.engine.sync(state, 1) == joined.engine.sync(state, 1)
    assert all(
        torch.equal(state[f"model.layers.0.self_attn.{n}.weight"], getattr(attention, n).weight)
        for n in ("q_proj", "k_proj", "v_proj")
    )
    requests = [make_request("a", 9, samples=2)]
    assert logprob_gap(plain.engine.generate(requests), joined.engine.generate(requests)) == 0


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_joined_projections_of_a_gated_delta_net_take_new_weights(make_bench, make_request, family):
    from tracefp4.models.tiny import tiny_model
    from tracefp4.rollout.projections import GROUPS

    joined, fresh = make_bench(family, compile_decode="eager"), make_bench(family, model_options={"seed": 9})
    net = joined.engine.model.get_submodule(joined.engine.layout.deltas[0])
    names = next(group for group in GROUPS if hasattr(net, group[0]))
    assert len({getattr(net, name).weight.untyped_storage().data_ptr() for name in names}) == 1
    joined.engine.sync(dict(tiny_model(family, seed=9, dtype=torch.float32).named_parameters()), 1)
    requests = [make_request("a", 9, samples=2)]
    assert logprob_gap(joined.engine.generate(requests), fresh.engine.generate(requests)) == 0


@pytest.mark.parametrize("change", ["missing", "hook", "class", "bias", "tied"])
def test_other_projections_are_left_alone(change):
    from torch import nn

    from tracefp4.rollout.projections import join

    attention = nn.Module()
    attention.q_proj, attention.k_proj, attention.v_proj = (nn.Linear(8, n, bias=False) for n in (16, 8, 8))
    if change == "missing":  # latent attention
        del attention.k_proj
    if change == "hook":
        attention.k_proj.register_forward_hook(lambda *_: None)
    if change == "class":
        attention.v_proj = nn.Sequential(attention.v_proj)
    if change == "bias":
        attention.q_proj = nn.Linear(8, 16)
    if change == "tied":
        attention.v_proj.weight = attention.k_proj.weight
    assert not join(attention)
    assert not any("forward" in vars(part) for part in attention.children())


@pytest.mark.slow
def test_fused_layers_agree_up_to_rounding(make_bench, make_request):
    requests = [make_request("a", 9, samples=2)]
    expected = make_bench().engine.generate(requests)
    found = make_bench(compile_decode=True).engine.generate(requests)
    assert [r.response_ids for r in expected] == [r.response_ids for r in found]
    assert logprob_gap(expected, found) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_fused_layers_in_graphs_agree_up_to_rounding(make_bench, make_request, family):
    """Without kernels, which float32 leaves out; with them all families stand in ``test_everything.py``."""
    requests = [make_request("a", 21, samples=3), make_request("b", 5)]
    plain = make_bench(family, device="cuda", cuda_graphs=False)
    fused = make_bench(family, device="cuda", cuda_graphs=True, compile_decode=True)
    expected, found = plain.engine.generate(requests), fused.engine.generate(requests)
    assert fused.engine.stats.graph_steps > 0
    assert all(fused.record(rollout).valid.all() for rollout in found)
    gaps = torch.tensor([
        abs(p - q) for a, b in zip(expected, found, strict=True) for p, q in zip(a.logprobs, b.logprobs, strict=False)
    ])  # fmt: skip
    # A code that flips moves what follows it, so only most tokens are close.
    assert gaps.median() < 1e-3
