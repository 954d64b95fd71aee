"""The experts function: one forward pass for the routed experts of every family.

Transformers calls ``f(module, hidden_states, top_k_index, top_k_weights)`` for the implementation that the
configuration names, and passes the module that holds the stacked weights. Ours is registered as ``"tracefp4"`` and
meets the two quantized tensors on the way::

    x (T, H) -> site.enter -> gate_up, bias -> module._apply_gate -> h (P, I) -> site.middle -> down, bias -> (P, H)

    y[t] = sum over slots k = 0..K-1 of  weight[t, k] * out[t, k]      float32, in slot order, rounded once

The input is quantized once a token, before it is copied to its ``K`` experts, and ``middle`` sees one row for each pair
(token, slot). The sum has a fixed order, with no atomic additions, so a batch gives the same bits each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import ModelError
from tracefp4.kernels.runtime import usable
from tracefp4.models import opaque, trained
from tracefp4.models.dispatch import Dispatch, Strategy, choose_strategy, dispatch
from tracefp4.models.linear import expert_linear
from tracefp4.models.sites import ExpertsSite, Operand

NAME = "tracefp4"
"""Name of our implementations in the registries of transformers, and of the attribute that holds a site object."""


def site_of(module: nn.Module) -> Any:
    """Return the site object bound to ``module``.

    Raises:
        ModelError: nothing is bound.
    """
    site = getattr(module, NAME, None)
    if site is None:
        raise ModelError(
            f"{type(module).__name__} uses the {NAME!r} implementation but has no site object; "
            "call tracefp4.models.binding.bind(model, sites) first"
        )
    return site


def refuse_autocast(x: Tensor) -> None:
    """Refuse autocast, which would narrow the float32 products that both sides count on.

    Raises:
        ModelError: autocast is enabled on the device of ``x``.
    """
    if torch.is_autocast_enabled(x.device.type):
        raise ModelError("autocast changes the arithmetic of quantized layers; load the model in bfloat16 instead")


def check_experts(module: Any, name: str) -> None:
    """Refuse experts modules that this function does not compute.

    Raises:
        ModelError: a feature that changes the result, by name.
    """
    unsupported = {
        "has_post_expert_norm": "a norm after each expert",
        "_is_expert_parallel": "expert parallelism",
    }
    for flag, words in unsupported.items():
        if getattr(module, flag, False):
            raise ModelError(f"{name}: {words} ({flag}) is not supported")
    if not getattr(module, "has_gate", True) or not hasattr(module, "_apply_gate"):
        raise ModelError(f"{name}: experts need a gate and the experts interface of transformers v5")
    if not module.gate_up_proj.dtype.is_floating_point:
        raise ModelError(f"{name}: weights are stored as {module.gate_up_proj.dtype}; load the model in bfloat16")


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, added: Tensor | None = None
) -> Tensor:
    """Compute the routed experts of one layer through its site object.

    Args:
        module: the experts module, bound.
        hidden_states: ``(T, H)`` in the model's dtype.
        top_k_index: ``(T, K)`` integer expert ids.
        top_k_weights: ``(T, K)`` gate values, float.
        added: ``T H`` values, contiguous, to be added to the rounded result; only an engine passes it.

    Returns:
        ``(T, H)`` in the dtype of ``hidden_states``; in the shape of ``added`` if that is given.

    Raises:
        ModelError: unbound, expert parallel, or under autocast.
    """
    if torch.compiler.is_compiling():
        return opaque.experts(hidden_states, top_k_index, top_k_weights, getattr(module, opaque.KEY))
    site: ExpertsSite = site_of(module)
    if getattr(module, "_is_expert_parallel", False):
        raise ModelError("expert parallelism is not supported")
    refuse_autocast(hidden_states)
    weights = _kernel_weights(module, site, hidden_states)
    if weights is not None:
        return _by_kernel(module, site, hidden_states, top_k_index, top_k_weights, weights, added)
    if (
        added is None
        and _training(module)
        and getattr(site, "strategy", "auto") == "auto"
        and trained.takes(module, hidden_states)
    ):
        return trained.forward(module, site, hidden_states, top_k_index, top_k_weights, silu=_gate_is_silu(module))
    plan = _plan(module, site, hidden_states, top_k_index)
    transposed = bool(getattr(module, "is_transposed", False))
    up_bias, down_bias = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)

    up, x_op = site.gate_up(module), site.enter(hidden_states)
    gate_up = expert_linear(
        hidden_states, module.gate_up_proj, x_op, up, up_bias, plan, per_token=True, transposed=transposed
    )
    h = module._apply_gate(gate_up)
    down, h_op = site.down(module), site.middle(h, plan.pairs)
    out = expert_linear(h, module.down_proj, h_op, down, down_bias, plan, per_token=False, transposed=transposed)
    found: Tensor = _Combine.apply(out, top_k_weights, plan)
    return found if added is None else found.view(added.shape) + added


def _kernel_weights(module: Any, site: Any, x: Tensor) -> Any:
    """Weights for the grouped kernel, if the site has them and nobody wants a gradient."""
    find = getattr(site, "by_kernel", None)
    if find is None or x.dtype is not torch.bfloat16 or not usable(x) or torch.is_grad_enabled():
        return None
    return find(module)


def _by_kernel(
    module: Any, site: ExpertsSite, x: Tensor, index: Tensor, gates: Tensor, weights: Any, added: Tensor | None
) -> Tensor:
    """The same layer by the grouped kernel: pairs stay in the order token, slot, and nothing waits for the host."""
    from tracefp4.kernels.experts import grouped_linear, tile_rows, weighted_sum
    from tracefp4.kernels.routing import route

    (up, down), bias = weights, module.has_bias
    pairs = route(index, module.num_experts, tile_rows(index.numel(), module.num_experts))
    x_op = site.enter(x)
    gate_up = grouped_linear(
        x_op.values, x_op.scale, up, pairs, per_token=True, bias=module.gate_up_proj_bias if bias else None,
        second=x_op.second,
    )  # fmt: skip
    h_op = _middle(module, site, gate_up)
    out = grouped_linear(
        h_op.values, h_op.scale, down, pairs, per_token=False, bias=module.down_proj_bias if bias else None,
        second=h_op.second,
    )  # fmt: skip
    found = weighted_sum(out, gates, added)
    return found if added is None else found.view(added.shape)


def _middle(module: Any, site: Any, gate_up: Tensor) -> Operand:
    """Gate and ``site.middle``, pairs in order; one pass if the site has one and the gate is ``silu(gate) * up``."""
    from tracefp4.kernels.gate import gate

    if not _gate_is_silu(module):
        return site.middle(module._apply_gate(gate_up), None)
    operand = site.gated(gate_up)
    return site.middle(gate(gate_up), None) if operand is None else operand


def _gate_is_silu(module: Any) -> bool:
    """Whether ``module._apply_gate`` is the one that transformers gives to experts without their own, with SiLU."""
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe

    usual = getattr(moe, "_default_apply_gate", None)
    return (
        usual is not None
        and getattr(type(module), "_apply_gate", None) is usual
        and type(getattr(module, "act_fn", None)) in (SiLUActivation, nn.SiLU)
    )


def _plan(module: Any, site: ExpertsSite, x: Tensor, index: Tensor) -> Dispatch:
    """Choose the strategy; a site object may name one in an attribute ``strategy``."""
    strategy: Strategy = getattr(site, "strategy", "auto")
    if strategy == "auto":
        strategy = choose_strategy(x.shape[0], module.num_experts, x.device, _training(module))
    return dispatch(index, module.num_experts, strategy)


def _training(module: Any) -> bool:
    """A checkpointed layer may first run without gradients: the mode of the module tells, not grad mode alone."""
    return module.training or torch.is_grad_enabled()


class _Combine(torch.autograd.Function):
    """Weighted sum of a token's expert outputs, in slot order."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
        slots = _by_slot(out, plan)
        ctx.save_for_backward(slots, weights)
        ctx.plan = plan
        wide = torch.float64 if out.dtype is torch.float64 else torch.float32
        scale = weights.to(wide).unsqueeze(-1)
        total = slots[:, 0].to(wide) * scale[:, 0]
        for slot in range(1, plan.top_k):
            total = torch.addcmul(total, slots[:, slot].to(wide), scale[:, slot])
        return total.to(out.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        slots, weights = ctx.saved_tensors
        wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
        grad = grad.to(wide)
        grad_out = grad_weights = None
        if ctx.needs_input_grad[0]:
            pairs = ctx.plan.pairs
            rows = grad[ctx.plan.tokens] * weights.to(wide).reshape(-1)[pairs].unsqueeze(-1)
            grad_out = rows.to(slots.dtype)
        if ctx.needs_input_grad[1]:
            grad_weights = (slots.to(wide) * grad.unsqueeze(1)).sum(-1).to(weights.dtype)
        return grad_out, grad_weights, None


def _by_slot(out: Tensor, plan: Dispatch) -> Tensor:
    """Return ``(T, K, H)`` from rows in the order of ``plan``."""
    if not plan.dense:
        slots = torch.empty_like(out)
        slots[plan.pairs] = out
        out = slots
    return out.view(plan.num_tokens, plan.top_k, out.shape[1])


def register() -> None:
    """Register :func:`experts_forward` with transformers under :data:`NAME`; again is harmless."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
