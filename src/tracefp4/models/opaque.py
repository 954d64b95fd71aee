"""The seams as operators of PyTorch, so that a compiler can pass them by.

``torch.compile`` traces a decoder layer and fuses its many small kernels: norms, RoPE, residual additions, gates. What
site objects do must not be traced: they keep state, count calls and choose kernels by themselves. So each seam is one
*operator* for the compiler, with a known output shape and an unknown inside. At run time the operator finds the module
by a number and calls exactly what an uncompiled model calls.

The number is a plain attribute of the module. With ``allow_unspec_int_on_nn_module`` the compiler treats it as an
input, and one compiled graph serves all layers of a kind.

These operators have no gradient: only an engine compiles.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import ModelError
from tracefp4.models.sites import Choice

KEY = "tracefp4_key"
"""Attribute of a bound module that holds its number."""

_MODULES: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)


def give_key(module: nn.Module) -> None:
    """Number a module."""
    number = next(_NUMBERS)
    object.__setattr__(module, KEY, number)
    _MODULES[number] = module


def take_key(module: nn.Module) -> None:
    """Take its number away again."""
    _MODULES.pop(getattr(module, KEY), None)
    object.__delattr__(module, KEY)


def _module(key: int) -> Any:
    module = _MODULES.get(int(key))
    if module is None:
        raise ModelError(f"a compiled layer asks for module {key}, which is gone; compile the model again")
    return module


@torch.library.custom_op("tracefp4::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, module: int, scaling: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attention of one layer through its site object; see :func:`tracefp4.models.attention.attention_forward`."""
    layer = _module(module)
    out = layer.tracefp4.attend(layer, query, key, value, scaling=scaling, window=window, sinks=sinks)
    return out.contiguous()


@attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, module: int, scaling: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3])


@torch.library.custom_op("tracefp4::attend_heads", mutates_args=())
def attend_heads(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, module: int, width: int
) -> Tensor:
    """Attention of one layer from its projections, ``width`` values a token: :func:`tracefp4.models.heads.attend`."""
    from tracefp4.models.heads import attend as attend_projected

    return attend_projected(_module(module), query, key, value, cos, sin).contiguous()


@attend_heads.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, module: int, width: int) -> Tensor:
    return query.new_empty(*query.shape[:2], width)


@torch.library.custom_op("tracefp4::experts", mutates_args=())
def experts(hidden: Tensor, index: Tensor, weights: Tensor, module: int, added: Tensor | None = None) -> Tensor:
    """Routed experts of one layer through their site object; see :func:`tracefp4.models.experts.experts_forward`."""
    from tracefp4.models.experts import experts_forward

    return experts_forward(_module(module), hidden, index, weights, added)


@experts.register_fake
def _(hidden: Tensor, index: Tensor, weights: Tensor, module: int, added: Tensor | None = None) -> Tensor:
    return torch.empty_like(hidden if added is None else added, memory_format=torch.contiguous_format)


@torch.library.custom_op("tracefp4::enter", mutates_args=())
def enter(x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: bool, module: int) -> tuple[Tensor, Tensor]:
    """``x + added`` and its norm, which the experts of one layer take; see :mod:`tracefp4.rollout.rewrite`."""
    return _module(module).tracefp4.enter_normed(x, added, weight, eps, offset)


@enter.register_fake
def _(x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: bool, module: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("tracefp4::route", mutates_args=())
def route(index: Tensor, module: int) -> Tensor:
    """Show a router's choice to its site object and return it.

    Raises:
        ModelError: the site object answers with other routes, which a compiled model cannot take.
    """
    if _module(module).tracefp4.route(index) is not None:
        raise ModelError("a compiled model cannot replay routes; compile only an engine's model")
    return index.clone()


@route.register_fake
def _(index: Tensor, module: int) -> Tensor:
    return torch.empty_like(index)


@torch.library.custom_op("tracefp4::choose", mutates_args=())
def choose(logits: Tensor, module: int, top_k: int, renormalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A plain router's choice by its site object; see :class:`tracefp4.models.sites.ChoosingSite`."""
    return _module(module).tracefp4.choose(logits, Choice(top_k, renormalise, dtype))


@choose.register_fake
def _(logits: Tensor, module: int, top_k: int, renormalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("tracefp4::latent", mutates_args=())
def latent(x: Tensor, module: int) -> Tensor:
    """The KV latent of one layer through its site object; see :func:`tracefp4.models.latent.hook_latent`."""
    out = _module(module).tracefp4.latent(x)
    return out.clone() if out is x else out


@latent.register_fake
def _(x: Tensor, module: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tracefp4::delta", mutates_args=())
def delta(mixed: Tensor, a: Tensor, b: Tensor, module: int, width: int) -> Tensor:
    """One token of a gated delta net through its site object; see :func:`tracefp4.models.delta.step`."""
    from tracefp4.models.delta import step

    return step(_module(module), mixed, a, b).contiguous()


@delta.register_fake
def _(mixed: Tensor, a: Tensor, b: Tensor, module: int, width: int) -> Tensor:
    return mixed.new_empty(*mixed.shape[:2], width)
