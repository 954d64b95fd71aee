"""Attention modules whose norms and rotary embedding an engine may do by itself, and those that keep their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tracefp4.models import heads
from tracefp4.models.binding import bind
from tracefp4.models.key_basis import KeyBasis, random_signs, set_basis
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model


class Sites:
    """Site objects that remember how they were asked, and attend to nothing."""

    def __init__(self, answers=False):
        self.answers, self.calls = answers, []

    def experts(self, layer):
        return SimpleNamespace()

    router = experts

    def attention(self, layer):
        return self

    def attend_heads(self, module, sizes, q, k, v, cos, sin):
        self.calls.append("heads")
        return q.unflatten(2, (-1, sizes.width)).clone() if self.answers else None

    def attend(self, module, q, k, v, *, scaling, window, sinks):
        self.calls.append("attend")
        return (q * scaling + k.mean() - v.mean()).transpose(1, 2)


def bound(family, **options):
    model, sites = tiny_model(family, seed=3, dtype=torch.float32), Sites(**options)
    bind(model, sites)
    return model.get_submodule(describe(model).attentions[max(describe(model).attentions)]), sites


def traced(module, x, cos, sin):
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        compiled = torch.compile(type(module).__call__, backend="eager", fullgraph=True)
        return compiled(module, hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)[0]


def inputs(module, width):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 1, module.q_proj.in_features, generator=generator)
    return (x, *torch.randn(2, 2, 1, width, generator=generator))


PLAIN = {"qwen3_moe": True, "mixtral": False}
"""Family, and whether it normalises queries and keys."""


@pytest.mark.parametrize("family", PLAIN)
def test_plain_families_hand_over_what_they_project(family):
    module, sites = bound(family)
    given = inputs(module, module.head_dim)
    with torch.no_grad():
        expected = module(hidden_states=given[0], position_embeddings=given[1:], attention_mask=None)[0]
    assert heads.hook(module) and heads.hook(module)  # twice is once
    assert module.tracefp4_heads.normed is PLAIN[family]
    sites.calls.clear()
    assert torch.equal(traced(module, *given), expected) and sites.calls == ["heads", "attend"]
    with torch.no_grad():
        uncompiled = module(hidden_states=given[0], position_embeddings=given[1:], attention_mask=None)[0]
    assert torch.equal(uncompiled, expected) and sites.calls[2:] == ["attend"]
    sites.answers = True
    sites.calls.clear()
    assert torch.equal(traced(module, *given), module.o_proj(module.q_proj(given[0]))) and sites.calls == ["heads"]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_moe", "deepseek_v3"])
def test_families_that_do_more_keep_their_own_forward(family):
    module, _ = bound(family)
    assert not heads.hook(module) and "forward" not in vars(module)


@pytest.mark.parametrize("change", ["factor", "norm", "hook", "basis"])
def test_a_module_that_differs_in_anything_keeps_its_own_forward(change, monkeypatch):
    module, sites = bound("qwen3_moe")
    if change == "factor":  # as some families scale queries by their position
        own = type(module).forward

        def forward(self, **kwargs):
            kwargs["hidden_states"] = kwargs["hidden_states"] * 1.001
            return own(self, **kwargs)

        monkeypatch.setattr(type(module), "forward", forward)
    elif change == "norm":
        monkeypatch.setattr(type(module.q_norm), "forward", lambda self, x: x * self.weight)
    elif change == "basis":
        set_basis(module, KeyBasis(None, random_signs(module.head_dim)))
    else:
        module.q_norm.register_forward_hook(lambda *_: None)
    assert not heads.hook(module) and module.tracefp4 is sites


def test_angles_of_a_part_of_each_head_are_turned_by_the_module():
    module, sites = bound("qwen3_moe")
    assert heads.hook(module)
    x, cos, sin = inputs(module, module.head_dim // 2)
    sites.calls.clear()
    with pytest.raises(Exception, match="size"):  # this family's own code takes whole heads alone
        traced(module, x, cos, sin)
    assert sites.calls == []
