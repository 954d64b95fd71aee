"""Quantized weights and saved activations: kept once a step, in a form that changes no bit."""

from contextlib import nullcontext

import pytest
import torch

from tracefp4.formats.spec import get_spec
from tracefp4.kernels.runtime import interpreted
from tracefp4.models.binding import bind
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.training import weights
from tracefp4.training.batch import Example, collate
from tracefp4.training.policy import recompute_layers, token_logprobs
from tracefp4.training.sites import TrainerSites
from tracefp4.training.weights import IN_FLIGHT, WeightOperands


@pytest.fixture
def packings(monkeypatch) -> list[int]:
    """Every quantization of a weight."""
    made: list[int] = []
    for name in ("pack_weight", "weight_operand"):
        real = getattr(weights, name)

        def counted(weight, *args, real=real, **kwargs):
            made.append(weight.numel())
            return real(weight, *args, **kwargs)

        monkeypatch.setattr(weights, name, counted)
    return made


def _sites(family: str, cache: str, spec: str = "nvfp4-w4a4-kv4") -> tuple[torch.nn.Module, TrainerSites]:
    model = tiny_model(family, 0)
    wanted = get_spec(spec)
    sites = TrainerSites(describe(model), wanted, weights=WeightOperands(wanted.weights, cache))
    bind(model, sites)
    return model, sites


def _step(model: torch.nn.Module, sites: TrainerSites, micro_batches: int = 3) -> dict[str, torch.Tensor]:
    for seed in range(micro_batches):
        tokens = torch.randint(3, 200, (17,), generator=torch.Generator().manual_seed(seed)).tolist()
        batch = collate([Example(tuple(tokens), 5)], torch.device("cpu"))
        with sites.batch(batch):
            token_logprobs(model, batch)[0].sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cache", ["widened", "packed"])
def test_a_weight_is_quantized_once_a_step(cache, recompute, packings):
    model, sites = _sites("qwen3_moe", cache)
    if recompute:
        recompute_layers(model)
        model.train()
    _step(model, sites)
    assert len(packings) == 2 * len(sites.layout.moe_layers)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0)
    _step(model, sites)
    assert len(packings) == 4 * len(sites.layout.moe_layers)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_no_form_changes_a_gradient(family, recompute):
    found = []
    for cache, pack in (("widened", False), ("packed", False), ("packed", True)):
        model, sites = _sites(family, cache)
        sites.pack_saved = pack
        if recompute:
            recompute_layers(model)
            model.train()
        found.append(_step(model, sites))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, grad in found[0].items():
            assert torch.equal(grad, other[name]), name


def test_packed_weights_are_small():
    sizes = {}
    for cache in ("widened", "packed"):
        model, sites = _sites("qwen3_moe", cache)
        _step(model, sites)
        sizes[cache] = sites.weights.nbytes()
        values = sum(p.numel() for name, p in model.named_parameters() if name.endswith("_proj") and p.ndim == 3)
        layers = len(sites.layout.moe_layers)
    assert sizes["widened"] == 4 * values  # float32 on a CPU
    experts = 2 * layers * sites.layout.num_experts
    assert sizes["packed"] == pytest.approx(values * (0.5 + 1 / 16) + 4 * experts + 4 * values / layers)
    assert len(sites.weights._operands) == IN_FLIGHT


def test_saved_codes_are_smaller_than_saved_values():
    sizes = []
    for pack in (False, True):
        model, sites = _sites("qwen3_moe", "packed")
        sites.pack_saved = pack
        saved: dict[int, int] = {}

        def keep(tensor, saved=saved):
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _step(model, sites, 1)
        sizes.append(sum(saved.values()))
    assert sizes[1] < sizes[0]


def test_managed_weights_change_when_it_is_said(packings):
    model, sites = _sites("qwen3_moe", "packed")
    sites.weights.manage()
    _step(model, sites, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    before = len(packings)
    _step(model, sites, 1)
    assert len(packings) == before
    sites.weights.renew()
    _step(model, sites, 1)
    assert len(packings) == 2 * before


def test_eight_bit_weights_are_kept_widened():
    assert WeightOperands(get_spec("nvfp4-w4a4").weights, "packed").cache == "packed"
    assert WeightOperands(None, "packed").cache == "widened"


@pytest.mark.parametrize("spec", ["nvfp4-w4a4-kv4", "mxfp4-w4a4-kv4"])
@pytest.mark.parametrize("kernels", [False, True])
def test_operands_are_rewritten_where_they_lie(kernels, spec, device, monkeypatch):
    """What a captured graph repeats: new values and scales at the old addresses, those of a fresh quantization."""
    if kernels:  # as on a GPU, where operands stay in bfloat16 and a kernel writes them in place
        monkeypatch.setattr(weights, "widened", lambda operand: operand)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 2, "num_hidden_layers": 1}
    model = tiny_model("qwen3_moe", 0, dtype=torch.bfloat16, **sizes).to(device)
    numerics, names = get_spec(spec).weights, ("gate_up_proj", "down_proj")
    operands = WeightOperands(numerics)
    module = model.get_submodule(next(iter(describe(model).experts.values())))

    def places(found):
        return [(o.values.data_ptr(), None if o.scale is None else o.scale.data_ptr()) for o in found]

    with interpreted() if kernels and device.type == "cpu" else nullcontext():
        before = [operands.get(module, name) for name in names]
        old, values = places(before), [o.values.clone() for o in before]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(-1.7)
        operands.rewrite()
        operands.rewritten()
        found = [operands.get(module, name) for name in names]
        assert places(found) == old and operands.generation == 0
        for one, other, name in zip(found, values, names, strict=True):
            fresh = WeightOperands(numerics).get(module, name)
            assert not torch.equal(one.values, other) and torch.equal(one.values, fresh.values)
            assert (one.scale is None) == (fresh.scale is None) == (spec[0] == "m")
            assert one.scale is None or torch.equal(one.scale, fresh.scale)
