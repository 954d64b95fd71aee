"""Binding to the eight families: nothing changes where nothing is quantized, and everything can be taken off again."""

from __future__ import annotations

import copy

import pytest
import torch

from tracefp4.errors import ModelError
from tracefp4.formats.spec import get_spec
from tracefp4.models.binding import bind, binding_of, bound, unbind
from tracefp4.models.layout import describe
from tracefp4.models.tiny import FAMILIES, tiny_config, tiny_model

families = pytest.mark.parametrize("family", FAMILIES)
SPEC = "nvfp4-w4a4-kv4"


def run(model, tokens):
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def gradients(model, tokens):
    model.zero_grad()
    logits = model(tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@families
def test_unquantized_sites_reproduce_transformers(make, tokens, family):
    model, sites, _ = make(family)
    plain = run(model, tokens)
    with bound(model, sites):
        torch.testing.assert_close(run(model, tokens), plain, atol=1e-5, rtol=1e-5)


@families
def test_unquantized_sites_in_bfloat16(make, tokens, family):
    model, sites, _ = make(family, dtype=torch.bfloat16)
    routers = {}
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")) and hasattr(module, "top_k"):
            layer = int(name.split(".")[2])
            module.register_forward_hook(lambda _, __, out, layer=layer: routers.__setitem__(layer, out[2]))
    plain = run(model, tokens).float()
    sites.replayed = dict(routers)
    with bound(model, sites):
        ours = run(model, tokens).float()
    assert (ours - plain).abs().mean() < 0.02 * plain.std()


@families
def test_unquantized_gradients_are_those_of_transformers(make, tokens, family):
    model, sites, _ = make(family)
    plain = gradients(model, tokens)
    bind(model, sites)
    ours = gradients(model, tokens)
    for name, grad in plain.items():
        torch.testing.assert_close(ours[name], grad, atol=2e-6, rtol=2e-4, msg=name)


@families
def test_quantized_sites_change_logits_and_pass_gradients(make, tokens, family):
    model, sites, layout = make(family, SPEC, torch.bfloat16)
    plain = run(model, tokens)
    bind(model, sites)
    assert not torch.equal(run(model, tokens), plain)
    grads = gradients(model, tokens)
    for layer in layout.moe_layers:
        assert grads[layout.experts[layer] + ".gate_up_proj"].abs().sum() > 0
        assert grads[layout.experts[layer] + ".down_proj"].abs().sum() > 0
        assert grads[layout.routers[layer] + ".weight"].abs().sum() > 0
    for layer in layout.kv_layers:
        keys = "kv_a_proj_with_mqa" if layout.latent_rank else "k_proj"
        assert grads[f"{layout.attentions[layer]}.{keys}.weight"].abs().sum() > 0
    assert all(torch.isfinite(grad).all() for grad in grads.values())


@families
def test_gradient_checkpointing_gives_the_same_gradients(make, tokens, family):
    model, sites, _ = make(family, SPEC, torch.bfloat16)
    bind(model, sites)
    model.train()
    plain = gradients(model, tokens)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    again = gradients(model, tokens)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@families
def test_bfloat16_is_deterministic(make, tokens, family):
    model, sites, _ = make(family, SPEC, torch.bfloat16)
    bind(model, sites)
    first, second = gradients(model, tokens), gradients(model, tokens)
    assert torch.equal(run(model, tokens), run(model, tokens))
    assert all(torch.equal(first[name], second[name]) for name in first)


@families
def test_unbind_restores_the_model(make, tokens, family):
    model, sites, layout = make(family, SPEC, torch.bfloat16)
    plain, names = run(model, tokens), list(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    bind(model, sites)
    assert list(model.state_dict()) == names
    unbind(model)
    assert torch.equal(run(model, tokens), plain)
    assert binding_of(model) is None
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    attention = model.get_submodule(layout.attentions[layout.kv_layers[0]])
    assert attention.config._attn_implementation == attention.config._experts_implementation == "eager"
    assert not any(module._forward_hooks for module in model.modules())


@families
def test_row_of_a_batch_does_not_depend_on_its_neighbours(make, tokens, family):
    model, sites, _ = make(family, SPEC, torch.bfloat16)
    bind(model, sites)
    together = run(model, tokens)
    swapped = run(model, tokens.flip(0)).flip(0)
    torch.testing.assert_close(swapped.float(), together.float(), atol=0.1, rtol=0)


@families
def test_right_padding_does_not_reach_tokens(make, tokens, family):
    model, sites, _ = make(family)
    bind(model, sites)
    mask = torch.ones_like(tokens)
    mask[0, 20:] = 0
    with torch.no_grad():
        padded = model(tokens, attention_mask=mask, use_cache=False).logits[0, :20]
        alone = model(tokens[:1, :20], use_cache=False).logits[0]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)


def test_composite_model_binds_its_decoder_only(sites_of, tokens):
    import transformers

    text = tiny_config("qwen3_5_moe")
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    torch.manual_seed(0)
    config = transformers.Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=vision)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).float().eval()
    plain = run(model, tokens)

    layout = describe(model)
    before = model.config.vision_config._attn_implementation
    sites = sites_of(layout)
    with bound(model, sites):
        assert model.config.vision_config._attn_implementation == before
        assert layout.decoder == "model.language_model"
        torch.testing.assert_close(run(model, tokens), plain, atol=5e-5, rtol=1e-4)


def test_refusals(make, tokens):
    model, sites, _ = make("qwen3_moe", SPEC, torch.bfloat16)
    with pytest.raises(ModelError, match="no site objects bound"):
        unbind(model)
    bind(model, sites)
    with pytest.raises(ModelError, match="already has site objects"):
        bind(model, sites)
    left = torch.ones_like(tokens)
    left[0, :3] = 0
    with pytest.raises(ModelError, match="pad on the right"):
        model(tokens, attention_mask=left, use_cache=False)
    cache = model(tokens[:, :8], use_cache=True).past_key_values
    with pytest.raises(ModelError, match="use_cache"):
        model(tokens[:, 8:9], past_key_values=cache)
    with pytest.raises(ModelError, match="4-D"):
        model(tokens, attention_mask=torch.zeros(2, 1, 24, 24), use_cache=False)


def test_refuses_autocast(make, tokens):
    model, sites, _ = make("qwen3_moe")
    bind(model, sites)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError, match="autocast"):
        model(tokens, use_cache=False)


def test_refuses_a_configuration_shared_with_a_bound_model(make, tokens):
    model, sites, _ = make("mixtral")
    other = type(model)(model.config)
    bind(model, sites)
    with pytest.raises(ModelError, match="shared"):
        bind(other, sites)
    with pytest.raises(ModelError, match="has no site object"):
        other(tokens, use_cache=False)


def test_refuses_hub_kernels_and_unknown_experts(make):
    model, sites, layout = make("qwen3_moe")
    model._use_kernels = True
    with pytest.raises(ModelError, match="use_kernels"):
        bind(model, sites)
    model._use_kernels = False
    experts = model.get_submodule(layout.experts[1])
    for flag, words in (("has_post_expert_norm", "norm"), ("_is_expert_parallel", "parallel")):
        setattr(experts, flag, True)
        with pytest.raises(ModelError, match=words):
            bind(model, sites)
        setattr(experts, flag, False)
    experts.has_gate = False
    with pytest.raises(ModelError, match="gate"):
        bind(model, sites)


def test_failed_bind_leaves_the_model_as_it_was(make, tokens, monkeypatch):
    model, sites, layout = make("deepseek_v3")
    plain = run(model, tokens)

    def fail(layer):
        raise ModelError("no such layer")

    monkeypatch.setattr(sites, "attention", fail)
    with pytest.raises(ModelError, match="no such layer"):
        bind(model, sites)
    assert torch.equal(run(model, tokens), plain)
    assert not hasattr(model.get_submodule(layout.experts[1]), "tracefp4")


def test_dense_model_needs_a_spec_without_experts(tokens):
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 288}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(ModelError, match="no MoE layer"):
        bind(model, None, spec=get_spec(SPEC))


def test_site_object_that_is_a_module_stays_out_of_the_state_dict(make):
    model, sites, _ = make("olmoe")

    class Wrapped(torch.nn.Linear):
        pass

    sites.router = lambda layer: Wrapped(2, 2)
    names = list(model.state_dict())
    bind(model, sites)
    assert list(model.state_dict()) == names


def test_copies_of_a_model_are_independent(make, tokens):
    model, sites, _ = make("glm4_moe")
    other = copy.deepcopy(model)
    plain = run(other, tokens)
    bind(model, sites)
    assert torch.equal(run(other, tokens), plain)


def test_tiny_models_repeat():
    first, second = tiny_model("gpt_oss", 3).state_dict(), tiny_model("gpt_oss", 3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ModelError, match="did you mean 'qwen3_moe'"):
        tiny_model("qwen3-moe")


@pytest.mark.gpu
@families
def test_on_cuda(sites_of, tokens, family):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tokens = tokens.cuda()
    model = tiny_model(family, dtype=torch.float32, device="cuda")
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    plain = run(model, tokens)
    with bound(model, sites_of(describe(model))):
        torch.testing.assert_close(run(model, tokens), plain, atol=1e-4, rtol=1e-4)
        model.train()
        torch.testing.assert_close(model(tokens, use_cache=False).logits, plain, atol=1e-4, rtol=1e-4)
    model = tiny_model(family, device="cuda")
    bind(model, sites_of(describe(model), get_spec(SPEC)))
    assert torch.equal(run(model, tokens), run(model, tokens))
    grads = gradients(model, tokens)
    assert all(torch.isfinite(grad).all() for grad in grads.values())
