"""Router replay."""

from __future__ import annotations

import pytest
import torch

from tracefp4.errors import ModelError
from tracefp4.models import routing
from tracefp4.models.binding import bind
from tracefp4.models.tiny import FAMILIES

families = pytest.mark.parametrize("family", FAMILIES)
RULES = {
    "qwen3_moe": routing.softmax_renormalised,
    "qwen3_5_moe": routing.softmax_renormalised,
    "qwen3_next": routing.softmax_renormalised,
    "gpt_oss": routing.softmax_chosen,
    "olmoe": routing.softmax_all,
    "mixtral": routing.softmax_renormalised,
    "deepseek_v3": routing.sigmoid_renormalised,
    "glm4_moe": routing.sigmoid_renormalised,
}


def forward(model, tokens):
    return model(tokens, use_cache=False).logits


def foreign(sites, layout, seed=5):
    generator = torch.Generator().manual_seed(seed)
    shape = next(iter(sites.routes.values())).shape
    rows = [torch.randperm(layout.num_experts, generator=generator)[: layout.top_k] for _ in range(shape[0])]
    return torch.stack(rows)


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rule_of_each_family_is_found(make, family, dtype):
    model, _, layout = make(family, dtype=dtype)
    for name in layout.routers.values():
        assert routing.probe_rule(model.get_submodule(name), name) is RULES[family]


@pytest.mark.parametrize(
    ("family", "rule"),
    [("qwen3_moe", "softmax_all"), ("olmoe", "softmax_renormalised"), ("deepseek_v3", "sigmoid_scaled")],
)
def test_rule_follows_norm_topk_prob(make, family, rule):
    model, _, layout = make(family, norm_topk_prob=family == "olmoe")
    name = layout.routers[layout.moe_layers[0]]
    assert routing.probe_rule(model.get_submodule(name), name).__name__ == rule


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_routes_change_nothing(make, tokens, family, dtype):
    model, sites, layout = make(family, dtype=dtype)
    bind(model, sites)
    with torch.no_grad():
        plain = forward(model, tokens)
        sites.replayed = dict(sites.routes)
        assert torch.equal(forward(model, tokens), plain)
    assert set(sites.routes) == set(layout.moe_layers)


@families
def test_foreign_routes_are_used_and_the_router_learns(make, tokens, family):
    model, sites, layout = make(family)
    bind(model, sites)
    plain = forward(model, tokens).detach()
    routes = foreign(sites, layout)
    sites.replayed = dict.fromkeys(layout.moe_layers, routes)
    logits = forward(model, tokens)
    assert (logits - plain).abs().max() > 0.01
    logits.square().mean().backward()
    for name in layout.routers.values():
        grad = model.get_submodule(name).weight.grad
        chosen = grad.abs().sum(-1) > 0
        assert chosen.all(), name


def test_gradient_of_the_router_under_replay_is_that_of_its_rule(make, tokens):
    """The gate values at foreign routes, by hand."""
    model, sites, layout = make("qwen3_moe")
    bind(model, sites)
    router = model.get_submodule(layout.routers[0])
    x = torch.randn(6, layout.hidden)
    routes = torch.tensor([[0, 5]] * 6)
    sites.replayed = {0: routes}
    _, weights, indices = router(x)
    assert torch.equal(indices, routes)
    probabilities = torch.softmax(x @ router.weight.t(), -1)[:, [0, 5]]
    torch.testing.assert_close(weights, probabilities / probabilities.sum(-1, keepdim=True))


def test_rows_of_minus_one_keep_the_own_choice(make, tokens):
    model, sites, layout = make("deepseek_v3")
    bind(model, sites)
    router = model.get_submodule(layout.routers[1])
    x = torch.randn(4, layout.hidden)
    _, own_weights, own = router(x)
    routes = torch.tensor([[0, 1], [-1, -1], [2, 3], [-1, -1]], dtype=torch.int16)
    sites.replayed = {1: routes}
    _, weights, indices = router(x)
    assert indices.dtype is own.dtype
    assert torch.equal(indices[[0, 2]], routes[[0, 2]].long())
    assert torch.equal(indices[[1, 3]], own[[1, 3]])
    assert torch.equal(weights[[1, 3]], own_weights[[1, 3]])


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_routers_are_told_from_others(make, family, dtype):
    model, _, layout = make(family, dtype=dtype)
    name = layout.routers[layout.moe_layers[0]]
    router = model.get_submodule(name)
    rule = routing.probe_rule(router, name)
    choice = routing.plain_choice(router, name, rule)
    if rule not in (routing.softmax_all, routing.softmax_renormalised):
        assert choice is None
        return
    assert choice is not None and choice.top_k == layout.top_k
    assert choice.renormalise == (rule is routing.softmax_renormalised)
    assert choice.dtype is (torch.float32 if family == "mixtral" else dtype)


def test_a_router_that_chooses_in_its_own_way_is_not_plain(make):
    """Its gate values follow a softmax, but it must not choose expert 0, or it has a state of its own."""
    model, _, layout = make("qwen3_moe")
    router = model.get_submodule(layout.routers[0])
    own = type(router)

    class Shy(own):
        def forward(self, hidden_states):
            logits = hidden_states @ self.weight.t()
            p = logits.float().softmax(-1)
            indices = p[:, 1:].topk(self.top_k, -1)[1] + 1
            p = p.gather(-1, indices)
            return logits, (p / p.sum(-1, keepdim=True)).to(logits.dtype), indices

    router.__class__ = Shy
    assert routing.plain_choice(router, "gate", routing.softmax_renormalised) is None
    router.__class__ = own
    assert routing.plain_choice(router, "gate", routing.softmax_renormalised) is not None
    router.register_buffer("bias", torch.zeros(layout.num_experts))
    assert routing.plain_choice(router, "gate", routing.softmax_renormalised) is None


def test_router_that_no_rule_explains_is_refused(make):
    model, sites, layout = make("mixtral")
    router = model.get_submodule(layout.routers[1])

    class Odd(type(router)):
        def forward(self, hidden_states):
            logits, weights, indices = super().forward(hidden_states)
            return logits, weights.square(), indices

    router.__class__ = Odd
    with pytest.raises(ModelError, match=r"router model\.layers\.1\.mlp\.gate .*none of the 5 known rules"):
        bind(model, sites)


def test_a_bias_that_the_block_hands_over_moves_the_choice_alone(make):
    """MiniMax-M2 and others: the rule is found, and a kernel that knows no bias must not choose."""
    model, _, layout = make("qwen3_moe")
    router = model.get_submodule(layout.routers[0])

    class Handed(type(router)):
        def forward(self, hidden_states, correction_bias):
            logits = hidden_states @ self.weight.t()
            p = logits.float().softmax(-1)
            indices = (p + correction_bias).topk(self.top_k, -1)[1]
            p = p.gather(-1, indices)
            return logits, (p / p.sum(-1, keepdim=True)).to(logits.dtype), indices

    router.__class__ = Handed
    assert routing.probe_rule(router, "gate") is routing.softmax_renormalised
    assert routing.plain_choice(router, "gate", routing.softmax_renormalised) is None


def test_a_router_that_wants_more_than_hidden_states_is_refused(make):
    model, sites, layout = make("mixtral")
    router = model.get_submodule(layout.routers[0])

    class Wants(type(router)):
        def forward(self, hidden_states, token_ids):
            return super().forward(hidden_states)

    router.__class__ = Wants
    with pytest.raises(
        ModelError, match=r"router model\.layers\.0\.mlp\.gate \(Wants\) cannot be tried out .*token_ids"
    ):
        bind(model, sites)


def test_replayed_routes_of_another_batch_are_refused(make, tokens):
    model, sites, _ = make("mixtral")
    bind(model, sites)
    sites.replayed = {0: torch.zeros(3, 2, dtype=torch.long)}
    with pytest.raises(ModelError, match="replayed routes"):
        forward(model, tokens)
