"""The norms of a trainer's layers, in one launch each.

Training is bound by launches long before it is bound by arithmetic, and a norm in transformers is eight of them, its
gradient some fifteen more. A trainer's norms go through :mod:`tracefp4.kernels.norm` instead. A name says nothing about
a norm's formula, so each is tried out when it is bound: one that does not compute

    weight * narrow(x * rsqrt(mean(x^2) + eps))

to the last bit keeps its own code. So does every norm outside training, on a CPU, or in another dtype.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tracefp4.kernels.runtime import usable


class FusedNorm:
    """A norm whose forward pass was replaced.

    Args:
        module: the norm; :func:`is_plain` holds for it.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        own = module.forward

        def forward(hidden_states: Tensor) -> Tensor:
            if not takes(module, hidden_states):
                return own(hidden_states)
            return _Norm.apply(hidden_states.contiguous(), module.weight, module.variance_epsilon)

        module.forward = forward

    def remove(self) -> None:
        """Let the norm run its own code again."""
        del self._module.forward


_FORM = "tracefp4_form"
"""Attribute of a norm that is kept whole: its :class:`Form`."""


def keep_whole(module: Any) -> bool:
    """Let a norm of a known form be one node of a graph that is being compiled; uncompiled it runs its own code.

    A compiler that is not told otherwise takes that node apart, with the roundings of :func:`plain_norm`.

    Returns:
        Whether its form is known.
    """
    form = form_of(module)
    if form is None:
        return False
    object.__setattr__(module, _FORM, form)
    # Bound to the module, as the compiler expects of a forward: all layers share one compiled graph.
    object.__setattr__(module, "forward", types.MethodType(_whole, module))
    return True


def _whole(module: Any, hidden_states: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        form = getattr(module, _FORM)
        return plain_norm(hidden_states, module.weight, form[0], form[1])
    found: Tensor = type(module).forward(module, hidden_states)
    return found


def takes(module: Any, x: Tensor) -> bool:
    """Whether the kernel computes this norm of ``x``: in training, bfloat16, on a GPU."""
    if not (module.training or torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return False
    if x.dtype is not torch.bfloat16 or module.weight.dtype is not x.dtype or not usable(x):
        return False
    from tracefp4.kernels.norm import WIDTH_LIMIT

    return x.shape[-1] <= WIDTH_LIMIT


class Form(NamedTuple):
    """What a norm computes."""

    eps: float
    added: bool
    """The factor is ``1 + weight`` in float32, and what it makes is rounded once."""


def is_plain(module: Any) -> bool:
    """Whether a module is the norm of the text above. It has to be materialised, and its forward not replaced."""
    form = form_of(module) if hasattr(module, "variance_epsilon") else None
    return form is not None and not form.added


def form_of(module: Any) -> Form | None:
    """What a norm computes, if :func:`plain_norm` computes it to the last bit; ``None`` for any other module."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(eps, float) or "forward" in vars(module):
        return None
    if weight.ndim != 1 or weight.is_meta or hasattr(weight, "placements") or list(module.children()):
        return None
    alone = len([*module.parameters(), *module.buffers()]) == 1 and not module._forward_hooks
    if not alone or len(inspect.signature(module.forward).parameters) != 1:
        return None  # others must not see random values; a gated norm has a second argument
    generator = torch.Generator().manual_seed(0)
    x, probe = (torch.randn(*shape, generator=generator) for shape in ((8, weight.numel()), weight.shape))
    x, probe = x.to(weight.device, weight.dtype), probe.to(weight.device, weight.dtype)
    with torch.no_grad():
        found = torch.func.functional_call(module, {"weight": probe}, (x,))
    forms = (form for form in (Form(eps, False), Form(eps, True)) if torch.equal(found, plain_norm(x, probe, *form)))
    return next(forms, None) if isinstance(found, Tensor) else None


@torch.compiler.allow_in_graph
def plain_norm(x: Tensor, weight: Tensor, eps: float, added: bool = False) -> Tensor:
    """The norm, written out; ``added``: with ``1 + weight`` as :class:`Form` says."""
    wide = x.to(torch.float32)
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normal * (1.0 + weight.float())).to(x.dtype) if added else weight * normal.to(x.dtype)


class _Norm(torch.autograd.Function):
    """The norm with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from tracefp4.kernels.norm import norm

        out, inverse = norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from tracefp4.kernels.norm import norm_backward

        x, weight, inverse = ctx.saved_tensors
        return *norm_backward(grads[0].contiguous(), x, weight, inverse), None
