"""The seam of gated delta nets: the site object steps when it says so, and everything can be taken off again."""

from __future__ import annotations

import types

import pytest
import torch

from tracefp4.models.binding import bind, bound, unbind
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model


@pytest.fixture
def stepping(make):
    """A model and sites that can also step; ``sites.on`` is what their objects say."""

    def build(family):
        model, sites, _ = make(family)
        seen = []

        class Site:
            steps = property(lambda self: sites.on)

            def step(self, module, mixed, a, b):
                seen.append((module.layer_idx, mixed.shape, a.shape, b.shape))
                return torch.zeros(len(mixed), module.num_v_heads, module.head_v_dim)

        sites.on, sites.delta = False, lambda layer: Site()
        return model, sites, seen

    return build


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_the_object_decides_who_computes(stepping, family):
    model, sites, seen = stepping(family)
    tokens = torch.tensor([[5], [7], [9]])
    with torch.no_grad():
        plain = model(tokens, use_cache=False).logits
        bind(model, sites)
        torch.testing.assert_close(model(tokens, use_cache=False).logits, plain, atol=1e-5, rtol=1e-5)
        assert not seen
        sites.on = True
        assert not torch.allclose(model(tokens, use_cache=False).logits, plain, atol=1e-3)
        # Two key heads and four value heads of 32.
        assert seen == [(layer, (3, 256), (3, 4), (3, 4)) for layer in (0, 2)]
        unbind(model)
        assert torch.equal(model(tokens, use_cache=False).logits, plain)
    module = model.get_submodule(describe(model).deltas[0])
    assert "forward" not in vars(module) and not hasattr(module, "tracefp4")


def test_sites_without_steps_leave_the_module_alone(make):
    model, sites, _ = make("qwen3_5_moe")
    with bound(model, sites) as layout:
        module = model.get_submodule(layout.deltas[0])
        assert "forward" not in vars(module) and not hasattr(module, "tracefp4")


def test_only_modules_of_known_arithmetic_are_stepped():
    model = tiny_model("qwen3_5_moe")
    assert describe(model).deltas == {i: f"model.layers.{i}.linear_attn" for i in (0, 2)}
    assert not describe(tiny_model("qwen3_moe")).deltas
    model.get_submodule("model.layers.0.linear_attn").activation = "gelu"  # type: ignore[assignment]
    other = model.get_submodule("model.layers.2.linear_attn")
    other.__class__ = types.new_class("Qwen9GatedDeltaNet", (type(other),))
    layout = describe(model)
    assert not layout.deltas and layout.linear_layers == (0, 2)
