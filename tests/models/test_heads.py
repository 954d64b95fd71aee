"""Attention modules whose norms and rotary embedding an engine may do by itself, and those that keep their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tracefp4.formats.spec import get_spec
from tracefp4.models import heads
from tracefp4.models.binding import bind, unbind
from tracefp4.models.key_basis import KeyBasis, random_signs, set_basis
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.training.sites import TrainerSites


class Plain:
    """Site objects that remember how they were asked, and attend to nothing. Like a trainer's, from the keys on."""

    def __init__(self, takes=False, answers=False):
        self.takes, self.answers, self.calls = takes, answers, []

    def experts(self, layer):
        return SimpleNamespace()

    router = experts

    def attention(self, layer):
        return self

    def attend(self, module, q, k, v, *, scaling, window, sinks):
        self.calls.append("attend")
        return (q * scaling + k.mean() - v.mean()).transpose(1, 2)


class Sites(Plain):
    """Like an engine's."""

    def takes_heads(self):
        return self.takes

    def attend_heads(self, module, sizes, q, k, v, cos, sin):
        self.calls.append("heads")
        return q.clone() if self.answers else None


def bound(family, sites=None):
    """The last attention module of a model, with norms whose weights show, its site object, and the model."""
    model, sites = tiny_model(family, seed=3, dtype=torch.float32), sites or Sites()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    bind(model, sites)
    return model.get_submodule(describe(model).attentions[max(describe(model).attentions)]), sites, model


def traced(module, x, cos, sin):
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        compiled = torch.compile(type(module).__call__, backend="eager", fullgraph=True)
        return compiled(module, hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)[0]


def inputs(module, width):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 1, module.q_proj.in_features, generator=generator)
    return (x, *torch.randn(2, 2, 1, width, generator=generator))


def turned_in(module):
    """Values of a head that the model turns."""
    factor = (module.config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    return int(module.head_dim * factor)


EPS = {"qwen3_moe": (1e-6, False), "mixtral": (None, False), "qwen3_5_moe": (1e-6, True), "qwen3_next": (1e-6, True),
       "glm4_moe": (1e-5, False)}  # fmt: skip
"""Family, and how it normalises queries and keys."""
PARTS = {"qwen3_5_moe": 8, "qwen3_next": 8, "glm4_moe": 16}
"""Values of a head of 32 that are turned, where it is not all."""


def run(module, given):
    with torch.no_grad():
        return module(hidden_states=given[0], position_embeddings=given[1:], attention_mask=None)[0]


@pytest.mark.parametrize("family", EPS)
def test_families_hand_over_what_they_project(family):
    own, _, _ = bound(family, Plain())
    module, sites, _ = bound(family)
    heads, part = module.tracefp4_heads, PARTS.get(family, module.head_dim)
    assert (heads.eps, heads.added) == EPS[family] and heads.turned == part == turned_in(module)
    assert heads.gated == (family in ("qwen3_5_moe", "qwen3_next"))
    given = inputs(module, part)
    expected = run(own, given)
    for sites.takes, calls in ((False, ["attend"]), (True, ["heads", "attend"])):
        sites.calls.clear()
        assert torch.equal(run(module, given), expected) and sites.calls == calls
    for sites.takes in (False, True):  # a graph asks when it runs
        sites.calls.clear()
        assert torch.equal(traced(module, *given), expected) and sites.calls == ["heads", "attend"]
    sites.answers = True
    for compute in (lambda: traced(module, *given), lambda: run(module, given)):
        sites.calls.clear()
        rows = module.q_proj(given[0]).unflatten(2, (heads.queries, -1))
        gate = rows[..., heads.width :].sigmoid() if heads.gated else 1.0
        assert torch.equal(compute(), module.o_proj((rows[..., : heads.width] * gate).flatten(2)))
        assert sites.calls == ["heads"]


@pytest.mark.parametrize("family", ["gpt_oss", "olmoe", "deepseek_v3"])
def test_families_that_do_more_keep_their_own_forward(family):
    module, _, _ = bound(family)
    assert heads.hook(module) is None and "forward" not in vars(module)


def test_unbinding_and_a_trainer_leave_modules_alone():
    module, _, model = bound("qwen3_moe")
    assert "forward" in vars(module) and heads.hook(module) is None  # once is enough
    unbind(model)
    assert "forward" not in vars(module) and not hasattr(module, "tracefp4_heads")
    layout = describe(model)
    bind(model, TrainerSites(layout, get_spec("nvfp4-kv4")))
    assert not any("forward" in vars(model.get_submodule(path)) for path in layout.attentions.values())


@pytest.mark.parametrize("change", ["factor", "norm", "hook", "basis", "gate"])
def test_a_module_that_differs_in_anything_keeps_its_own_forward(change, monkeypatch):
    module, sites, _ = bound("qwen3_5_moe" if change == "gate" else "qwen3_moe", Plain())
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
    elif change == "gate":
        monkeypatch.setattr(torch, "chunk", lambda x, parts, dim: x.chunk(parts, dim)[::-1])  # gates come first
    else:
        module.q_norm.register_forward_hook(lambda *_: None)
    assert heads.hook(module, turned_in(module)) is None and module.tracefp4 is sites


def test_a_basis_that_is_set_later_is_kept():
    """It is part of what the attention function computes, so the module keeps its own forward from then on."""
    module, sites, _ = bound("qwen3_moe", Sites(takes=True))
    given = inputs(module, module.head_dim)
    before = run(module, given)
    set_basis(module, KeyBasis(torch.full((2, 1, module.head_dim), 0.5), random_signs(module.head_dim)))
    sites.calls.clear()
    assert torch.equal(run(module, given), traced(module, *given)) and sites.calls == ["attend", "attend"]
    assert not torch.equal(run(module, given), before)


@pytest.mark.parametrize("takes", [False, True])
def test_angles_of_another_part_of_each_head_are_turned_by_the_module(takes):
    module, sites, _ = bound("qwen3_moe", Sites(takes=takes))
    x, cos, sin = inputs(module, module.head_dim // 2)
    sites.calls.clear()
    for compute in (traced, lambda module, *given: run(module, given)):
        with pytest.raises(Exception, match="size"):  # this family's own code takes whole heads alone
            compute(module, x, cos, sin)
    assert sites.calls == []
