"""Router replay: using the rollout's experts while the router still learns.

A router maps hidden states to ``(logits, weights, indices)``: for each token the ``K`` experts it chose and their gate
values. Two forward passes of one model choose different experts for some tokens, because a rounding difference decides
near ties. Replay takes the *indices* of the rollout; the gate values are computed again from the live logits at those
indices, so the gradient reaches the router as if it had chosen them itself.

Families differ in how gate values follow from logits. Rather than trusting a model's name, every rule below is tried on
the router's own choice, and the one that reproduces the router's own weights is taken. A router that no rule explains
is refused.

An engine has nothing to replay. Where a router is *plain*, the largest ``K`` of a softmax of one product, the engine's
site object may choose by itself, in one kernel (:mod:`tracefp4.kernels.choice`). Whether it is plain is tried out too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tracefp4.errors import ModelError
from tracefp4.kernels.runtime import usable
from tracefp4.models import opaque
from tracefp4.models.experts import site_of
from tracefp4.models.sites import Choice, ChoosingSite

Rule = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""``(router, logits (T, E), indices (T, K)) -> weights (T, K)``."""
Routed = tuple[Tensor, Tensor, Tensor]
"""``(logits, weights, indices)``, what a router returns."""


class Removable(Protocol):
    """What takes a hook off again, such as PyTorch's ``RemovableHandle``."""

    def remove(self) -> None:
        """Take it off."""
        ...


def softmax_all(router: nn.Module, logits: Tensor, indices: Tensor) -> Tensor:
    """Softmax over all experts in float32, then pick (Qwen3-MoE and OLMoE without ``norm_topk_prob``)."""
    return torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, indices)


def softmax_renormalised(router: nn.Module, logits: Tensor, indices: Tensor) -> Tensor:
    """Softmax over all experts in float32, pick, divide by the sum (Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, Mixtral)."""
    weights = softmax_all(router, logits, indices)
    return weights / weights.sum(dim=-1, keepdim=True)


def softmax_chosen(router: nn.Module, logits: Tensor, indices: Tensor) -> Tensor:
    """Softmax over the chosen logits, in their dtype (gpt-oss)."""
    return torch.softmax(logits.gather(-1, indices), dim=-1)


def sigmoid_scaled(router: nn.Module, logits: Tensor, indices: Tensor) -> Tensor:
    """Sigmoid, pick, scale by a constant (DeepSeek-V3 and GLM4-MoE without ``norm_topk_prob``)."""
    return logits.sigmoid().gather(-1, indices) * getattr(router, "routed_scaling_factor", 1.0)


def sigmoid_renormalised(router: nn.Module, logits: Tensor, indices: Tensor) -> Tensor:
    """Sigmoid, pick, divide by the sum, scale by a constant (DeepSeek-V3, GLM4-MoE)."""
    weights = logits.sigmoid().gather(-1, indices)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * getattr(router, "routed_scaling_factor", 1.0)


RULES: tuple[Rule, ...] = (softmax_renormalised, softmax_all, softmax_chosen, sigmoid_renormalised, sigmoid_scaled)


def choose_rule(router: nn.Module, logits: Tensor, weights: Tensor, indices: Tensor, name: str) -> Rule:
    """Return the rule that reproduces ``weights`` from ``logits`` at ``indices``.

    Args:
        router: the router, for its constants.
        logits: ``(T, E)`` of some tokens.
        weights: ``(T, K)`` that the router computed for them.
        indices: ``(T, K)`` that it chose.
        name: the router's name, for the message.

    Raises:
        ModelError: no rule reproduces them to four units in the last place of their dtype.
    """
    # Renormalised softmax and softmax of the chosen agree in exact arithmetic; the better fit in rounding decides, and
    # the router of gpt-oss is told by its bias where even that is equal.
    rules = sorted(RULES, key=lambda rule: rule is softmax_chosen, reverse=getattr(router, "bias", None) is not None)
    scale = weights.float().abs().amax()
    errors = [float((rule(router, logits, indices).to(weights.dtype) - weights).float().abs().amax()) for rule in rules]
    best = min(range(len(rules)), key=errors.__getitem__)
    tolerance = 4 * torch.finfo(weights.dtype).eps * float(scale)
    if not errors[best] <= tolerance:
        raise ModelError(
            f"router {name} ({type(router).__name__}): none of the {len(rules)} known rules gives its weights from its "
            f"logits (nearest: {rules[best].__name__}, off by {errors[best]:.3g}); its routes cannot be replayed"
        )
    return rules[best]


def probe_rule(router: Any, name: str) -> Rule:
    """Run ``router`` on random hidden states and choose its rule.

    Raises:
        ModelError: see :func:`choose_rule`, or a router that does not return ``(logits, weights, indices)``.
    """
    return choose_rule(router, *_probe(router, name)[1], name)


def plain_choice(router: Any, name: str, rule: Rule) -> Choice | None:
    """How ``router`` chooses if it is plain; ``None`` if it is not.

    Plain is a router without state besides its weight, own or handed to it, whose logits are one product, whose choice
    is the largest ``K`` of them in order, and whose gate values follow ``rule`` from a softmax over all experts.

    Raises:
        ModelError: a router that does not return ``(logits, weights, indices)``.
    """
    state = [*router.named_parameters(), *router.named_buffers()]
    if rule not in (softmax_all, softmax_renormalised) or [key for key, _ in state] != ["weight"] or _handed(router):
        return None
    hidden, (logits, weights, indices) = _probe(router, name)
    largest = logits.float().topk(indices.shape[-1], dim=-1).values
    same = torch.equal(logits, F.linear(hidden, router.weight))
    if not same or not torch.equal(logits.float().gather(-1, indices), largest):
        return None
    return Choice(indices.shape[-1], rule is softmax_renormalised, weights.dtype)


def _handed(router: Any) -> list[str]:
    """Biases that a block keeps and hands to its router (MiniMax-M2): they move the choice, and not the gate values."""
    return [key for key in inspect.signature(type(router).forward).parameters if key.endswith("bias")]


def _probe(router: Any, name: str, tokens: int = 64) -> tuple[Tensor, Routed]:
    """Random hidden states ``(tokens, H)``, and what the router makes of them.

    Raises:
        ModelError: a router that wants more than hidden states and a bias, or does not return ``(logits, weights,
            indices)``.
    """
    weight: Tensor = router.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, weight.shape[-1], generator=generator).to(weight.device, weight.dtype)
    zero = torch.zeros(weight.shape[0], device=weight.device)
    try:
        with torch.no_grad():
            # The class's own forward: hooks of others must not see our random tokens.
            output = type(router).forward(router, hidden, **dict.fromkeys(_handed(router), zero))
    except (TypeError, RuntimeError, ValueError, IndexError, AttributeError) as error:
        raise ModelError(
            f"router {name} ({type(router).__name__}) cannot be tried out on hidden states alone: {error}"
        ) from error
    if not isinstance(output, tuple) or len(output) != 3:
        raise ModelError(f"router {name} ({type(router).__name__}) does not return (logits, weights, indices)")
    return hidden, output


def hook_router(router: Any, name: str) -> Removable:
    """Pass the choices of ``router`` through ``route`` of its site object, and gate values through the router's rule.

    If the router is plain, its site object chooses by itself and kernels are in use, ``choose`` of the site object
    takes the place of the router's own code.

    The rule is chosen here, on random hidden states. A router whose weight is sharded or not materialised yet cannot
    run outside the model: its rule is chosen by the first forward that replays.

    Args:
        router: the router, bound.
        name: its name, for messages.

    Returns:
        What removes it again.

    Raises:
        ModelError: see :func:`probe_rule`.
    """
    weight = router.weight
    whole = not (weight.is_meta or hasattr(weight, "placements"))
    rule = probe_rule(router, name) if whole else None
    if rule is not None and isinstance(site_of(router), ChoosingSite) and usable(weight):
        choice = plain_choice(router, name, rule)
        if choice is not None and "forward" not in vars(router):
            return _Chosen(router, choice)
    return router.register_forward_hook(_Replay(name, rule))


class _Chosen:
    """Lets the site object of a plain router choose; the module's own code does not run."""

    def __init__(self, router: Any, choice: Choice) -> None:
        self._router = router

        def forward(hidden_states: Tensor) -> Routed:
            logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), router.weight)
            if torch.compiler.is_compiling():
                number = getattr(router, opaque.KEY)
                made = opaque.choose(logits, number, choice.top_k, choice.renormalise, choice.dtype)
            else:
                made = site_of(router).choose(logits, choice)
            return logits, *made

        router.forward = forward

    def remove(self) -> None:
        """Let the router run its own code again."""
        del self._router.forward


class _Replay:
    """The forward hook of one router."""

    def __init__(self, name: str, rule: Rule | None) -> None:
        self.name, self.rule = name, rule

    def __call__(self, module: nn.Module, _: Any, output: Routed) -> Routed | None:
        logits, weights, own = output
        if torch.compiler.is_compiling():
            return logits, weights, opaque.route(own, getattr(module, opaque.KEY))
        site = site_of(module)
        chosen = site.route(own)
        if chosen is None or chosen is own:  # a router that knew its routes has their gate values already
            return None
        if chosen.shape != own.shape:
            raise ModelError(
                f"router {self.name}: replayed routes {tuple(chosen.shape)} for a choice of {tuple(own.shape)}"
            )
        if self.rule is None:
            self.rule = choose_rule(module, logits.detach(), weights.detach(), own, self.name)
        chosen = chosen.to(own.device, own.dtype)
        settled = getattr(site, "settled", False)
        indices = chosen if settled else torch.where((chosen < 0).any(dim=-1, keepdim=True), own, chosen)
        return logits, self.rule(module, logits, indices).to(weights.dtype), indices
