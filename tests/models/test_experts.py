"""The experts function: slot order, strategies, and the order of its sums."""

from __future__ import annotations

import pytest
import torch

from tracefp4.errors import ModelError
from tracefp4.models.binding import bind
from tracefp4.models.experts import experts_forward, site_of
from tracefp4.models.layout import describe
from tracefp4.models.tiny import FAMILIES, tiny_model

SPEC = "nvfp4-w4a4-kv4"


def layer(sites_of, family, device="cpu", spec=SPEC):
    from tracefp4.formats.spec import get_spec

    model = tiny_model(family, device=device)
    layout = describe(model)
    sites = sites_of(layout, get_spec(spec))
    bind(model, sites)
    return model.get_submodule(layout.experts[layout.moe_layers[-1]]), sites, layout


def inputs(layout, device, tokens=9):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, layout.hidden, generator=generator).to(device, torch.bfloat16)
    index = torch.stack(
        [torch.randperm(layout.num_experts, generator=generator)[: layout.top_k] for _ in range(tokens)]
    )
    return x, index.to(device), torch.rand(tokens, layout.top_k, generator=generator).to(device)


@pytest.mark.parametrize("family", FAMILIES)
def test_strategies_agree(sites_of, family, device):
    module, sites, layout = layer(sites_of, family, device)
    x, index, weights = inputs(layout, device)
    results = []
    for strategy in ("loop", "grouped", "dense"):
        sites.strategy = strategy
        with torch.no_grad():
            results.append(module(x, index, weights).float())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=0.02, rtol=0.02)


def test_pairs_name_token_and_slot(sites_of):
    module, _, layout = layer(sites_of, "qwen3_moe")
    x, index, weights = inputs(layout, "cpu")
    site = site_of(module)
    module(x, index, weights)
    pairs = site.pairs[-1]
    assert sorted(pairs.tolist()) == list(range(index.numel()))
    assert index.reshape(-1)[pairs].tolist() == sorted(index.reshape(-1).tolist())


def test_tokens_do_not_depend_on_the_batch(sites_of, device):
    module, _, layout = layer(sites_of, "glm4_moe", device)
    x, index, weights = inputs(layout, device, tokens=32)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(4)).to(device)
    with torch.no_grad():
        all_rows = module(x, index, weights)
        shuffled = module(x[order], index[order], weights[order])
        alone = torch.cat([module(x[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(32)])
    torch.testing.assert_close(shuffled.float(), all_rows[order].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(alone.float(), all_rows.float(), atol=0.02, rtol=0.02)


def test_weighted_sum_is_rounded_once_in_slot_order(sites_of):
    """Two experts with the same output and weights 1 and 2**-9: bfloat16 partial sums would lose the second."""
    module, _, layout = layer(sites_of, "qwen3_moe", spec="bf16")
    with torch.no_grad():
        module.gate_up_proj[1], module.down_proj[1] = module.gate_up_proj[0], module.down_proj[0]
        x, _, _ = inputs(layout, "cpu", tokens=1)
        one = module(x, torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]])).double()
        both = module(x, torch.tensor([[0, 1]]), torch.tensor([[1.0, 2.0**-8 * 1.5]])).double()
    assert torch.equal(both, (one * (1 + 2.0**-8 * 1.5)).to(torch.bfloat16).double())


def test_repeated_experts_of_a_token_are_computed_for_each_slot(sites_of):
    module, _, layout = layer(sites_of, "mixtral", spec="bf16")
    x, _, _ = inputs(layout, "cpu", tokens=2)
    with torch.no_grad():
        twice = module(x, torch.tensor([[1, 1], [2, 2]]), torch.full((2, 2), 0.5))
        once = module(x, torch.tensor([[1, 0], [2, 0]]), torch.tensor([[1.0, 0.0]] * 2))
    torch.testing.assert_close(twice, once)


def test_gradient_of_gate_values_is_the_expert_output(sites_of):
    module, _, layout = layer(sites_of, "olmoe", spec="bf16")
    x, index, weights = inputs(layout, "cpu", tokens=3)
    weights.requires_grad_()
    y = module(x, index, weights)
    seed = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, weights, seed)
    with torch.no_grad():
        for slot in range(2):
            mask = torch.zeros(3, 2)
            mask[:, slot] = 1
            expected = (module(x, index, mask).float() * seed.float()).sum(-1)
            torch.testing.assert_close(grad[:, slot], expected, atol=1e-4, rtol=1e-4)


def test_unbound_module_is_refused():
    model = tiny_model("mixtral")
    experts = model.get_submodule("model.layers.0.mlp.experts")
    with pytest.raises(ModelError, match="MixtralExperts uses the 'tracefp4' implementation but has no site object"):
        experts_forward(experts, torch.zeros(1, 64), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_decode_step_can_be_captured(sites_of, family):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    module, sites, layout = layer(sites_of, family, "cuda")
    sites.strategy = "auto"
    x, index, weights = inputs(layout, "cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                module(x, index, weights)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = module(x, index, weights)
        x.copy_(torch.randn_like(x))
        index.copy_(index.flip(0))
        graph.replay()
        torch.testing.assert_close(captured, module(x, index, weights), atol=0, rtol=0)
