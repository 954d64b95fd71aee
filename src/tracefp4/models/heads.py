"""The seam between the projections of an attention layer and its attention, for compiled decode steps.

Between the two, transformers cuts projected rows into heads, normalises queries and keys (in some families), and turns
them by the angles of their token's position::

    x -> q, k, v -> norms of q and k -> rotary embedding -> attention -> o

A decode step has one token a sequence, so these are many launches for few values: an engine does them in the launch
that stores K and V. Here the projected rows are handed to the site object; where that has no kernel, the steps of the
picture are made one by one, with the roundings of the module's own code either way. What a module does between its
projections no name tells, so each is tried out: one that differs from the picture in any bit keeps its own forward.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.models import norms, opaque
from tracefp4.models.experts import NAME, site_of
from tracefp4.models.rotary import turned
from tracefp4.models.sites import Heads

_HEADS = "tracefp4_heads"
"""Attribute of a hooked module: its :class:`~tracefp4.models.sites.Heads`, a tuple, so constant for a compiler."""


def hook(module: Any) -> bool:
    """Let a bound attention module hand its projections to its site object wherever it is compiled.

    Uncompiled it runs its own code as before.

    Returns:
        Whether it is such a module.
    """
    if "forward" in vars(module) and not hasattr(module, _HEADS):
        return False
    heads = heads_of(module)
    if heads is None:
        return False
    object.__setattr__(module, _HEADS, heads)
    # Bound to the module, as the compiler expects of a forward: all layers share one compiled graph.
    object.__setattr__(module, "forward", types.MethodType(_forward, module))
    return True


def _forward(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """The module's own forward, or the picture above with the site object in its middle."""
    x, turn = kwargs.get("hidden_states"), kwargs.get("position_embeddings")
    # Only an engine compiles, and a cache that it passes keeps no K and V: its site objects do.
    plain = not args and kwargs.get("attention_mask") is None
    if not (torch.compiler.is_compiling() and plain and x is not None and turn is not None):
        return type(module).forward(module, *args, **kwargs)
    cos, sin = turn
    if cos.shape[-1] != getattr(module, _HEADS)[2]:  # turns a part of each head
        return type(module).forward(module, *args, **kwargs)
    key = getattr(module, opaque.KEY)
    out = opaque.attend_heads(module.q_proj(x), module.k_proj(x), module.v_proj(x), cos, sin, key)
    return module.o_proj(out), None


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Norms, rotary embedding and attention of projected rows through the site object of ``module``.

    Args:
        module: an attention module that was hooked.
        q: ``(B, S, Hq D)`` as it was projected.
        k: ``(B, S, Hk D)``.
        v: ``(B, S, Hk D)``.
        cos: ``(B or 1, S, D)``.
        sin: likewise.

    Returns:
        ``(B, S, Hq D)``.
    """
    heads: Heads = getattr(module, _HEADS)
    site = site_of(module)
    out = site.attend_heads(module, heads, q, k, v, cos, sin)
    if out is None:
        parts = _parts(module, heads, q, k, v, cos, sin)
        out = site.attend(module, *parts, scaling=heads.scaling, window=heads.window, sinks=None)
    return out.flatten(2)


def _parts(
    module: Any, heads: Heads, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``(B, H, S, D)`` of projected rows."""
    q, k, v = (x.unflatten(2, (-1, heads.width)) for x in (q, k, v))
    if heads.normed:
        q, k = module.q_norm(q), module.k_norm(k)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return turned(q, cos, sin), turned(k, cos, sin), v


@dataclass
class _Probe:
    """A site object that remembers what it is given and answers with random values."""

    generator: torch.Generator
    given: list[Any] = field(default_factory=list)
    answer: Tensor = field(default_factory=lambda: torch.empty(0))

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, window: int | None, sinks: Any
    ) -> Tensor:
        self.given.append((q, k, v, scaling, window, sinks))
        shape = q.shape[0], q.shape[2], q.shape[1], v.shape[3]
        self.answer = torch.randn(*shape, generator=self.generator).to(q.device, q.dtype)
        return self.answer


@torch.no_grad()
def heads_of(module: Any) -> Heads | None:
    """Sizes of a bound attention module that is the picture above to the last bit; ``None`` for any other."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    projections: list[Any] = [getattr(module, name, None) for name in names]
    width = getattr(module, "head_dim", None)
    if not all(type(p) is nn.Linear and not p.weight.is_meta for p in projections) or not isinstance(width, int):
        return None
    pair: list[Any] = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    normed = all(n is not None and norms.is_plain(n) and n.weight.numel() == width for n in pair)
    if (not normed and any(n is not None for n in pair)) or width % 2:
        return None
    if normed and pair[0].variance_epsilon != pair[1].variance_epsilon:
        return None
    weight, generator = projections[0].weight, torch.Generator().manual_seed(0)
    x, cos, sin = (
        torch.randn(2, 3, n, generator=generator).to(weight.device, weight.dtype)
        for n in (weight.shape[1], width, width)
    )
    probe, own = _Probe(generator), getattr(module, NAME)
    object.__setattr__(module, NAME, probe)
    try:
        found = type(module).forward(module, hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)
    except (TypeError, RuntimeError, ValueError, IndexError, AttributeError):
        return None  # it takes other arguments
    finally:
        object.__setattr__(module, NAME, own)
    if len(probe.given) != 1:
        return None
    *given, scaling, window, sinks = probe.given[0]
    queries, keys = given[0].shape[1], given[1].shape[1]
    heads = Heads(queries, keys, width, normed, float(scaling), window)
    if sinks is not None or any(
        p.out_features != n * width for p, n in zip(projections[:3], (queries, keys, keys), strict=True)
    ):
        return None
    q, k, v, o = projections
    expected = _parts(module, heads, q(x), k(x), v(x), cos, sin)
    # Weights that are not loaded yet would make everything equal.
    same = all(a.shape == b.shape and torch.equal(a, b) and a.any() for a, b in zip(given, expected, strict=True))
    return heads if same and torch.equal(found[0], o(probe.answer.flatten(2))) else None
