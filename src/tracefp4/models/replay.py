"""A router whose routes are known does not choose.

Under replay a router would compute its own choice, which nobody uses, and then the gate values of the recorded one. If
the routes of a whole micro-batch were recorded, a *plain* router (one product, then a softmax over all experts) does no
more than its product, and one kernel makes the gate values. Whether it is plain is tried out, as its rule is
(:mod:`tracefp4.models.routing`), and the result is the same up to the order of the softmax's sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.kernels.runtime import usable
from tracefp4.models.experts import site_of
from tracefp4.models.routing import Routed, plain_choice, probe_rule
from tracefp4.models.sites import Choice


class KnownRoutes:
    """A plain router whose forward pass was replaced.

    Args:
        router: bound to a site object with ``known_routes``.
        choice: from :func:`plain`.
    """

    def __init__(self, router: Any, choice: Choice) -> None:
        self._router = router
        own = router.forward

        def forward(hidden_states: Tensor) -> Routed:
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            index = _routes(router, x)
            if index is None:
                return own(hidden_states)
            logits = F.linear(x, router.weight)
            return logits, _GateValues.apply(logits, index, choice.renormalise), index

        router.forward = forward

    def remove(self) -> None:
        """Let the router run its own code again."""
        del self._router.forward


def plain(router: Any, name: str) -> Choice | None:
    """How a plain router makes its gate values; ``None`` if it is not plain, or no kernel is in use.

    Raises:
        ModelError: see :func:`tracefp4.models.routing.probe_rule`.
    """
    weight = router.weight
    if weight.is_meta or hasattr(weight, "placements") or "forward" in vars(router) or not usable(weight):
        return None
    choice = plain_choice(router, name, probe_rule(router, name))
    return choice if choice is not None and choice.dtype is weight.dtype else None


def _routes(router: Any, x: Tensor) -> Tensor | None:
    """Routes of the micro-batch in flight, if all are known and the kernel takes it."""
    if not (router.training or torch.is_grad_enabled()) or not usable(x) or router.weight.dtype is not torch.bfloat16:
        return None
    index = site_of(router).known_routes()
    return index if index is not None and index.shape[0] == x.shape[0] else None


class _GateValues(torch.autograd.Function):
    """Gate values with their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, renormalised: bool) -> Tensor:
        from tracefp4.kernels.gate_values import gate_values

        ctx.save_for_backward(logits, index)
        ctx.renormalised = renormalised
        return gate_values(logits, index, renormalised=renormalised, dtype=logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from tracefp4.kernels.gate_values import gate_values_backward

        logits, index = ctx.saved_tensors
        grad = grads[0].contiguous()
        return gate_values_backward(grad, logits, index, renormalised=ctx.renormalised), None, None
