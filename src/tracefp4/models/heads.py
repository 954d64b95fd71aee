"""The seam between the projections of an attention layer and its attention, for engines.

Between the two, transformers cuts projected rows into heads, normalises queries and keys (in some families), and turns
them, whole or in their first values, by the angles of their token's position. Some families project a gate beside each
head of queries, for what comes out::

    x -> q, k, v -> norms of q and k -> rotary embedding -> attention (times sigmoid(gate)) -> o

These are some twenty launches of an uncompiled layer, many for the few values of a decode step: an engine does them in
the launch that stores K and V. Here the projected rows are handed to a site object that begins there, a
:class:`~tracefp4.models.sites.ProjectingSite`; only an engine's does, so a trainer's modules are never touched. Where
it has no kernels, an uncompiled module runs its own forward, and a compiled one the steps of the picture one by one.
Roundings are those of the module's own code whichever way. What a module does between its projections no name tells,
so each is tried out: one that differs from the picture in any bit keeps its own forward.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.models import norms, opaque
from tracefp4.models.experts import NAME, refuse_autocast, site_of
from tracefp4.models.key_basis import basis_of
from tracefp4.models.rotary import turned
from tracefp4.models.sites import Heads

_HEADS = "tracefp4_heads"
"""Attribute of a hooked module: its :class:`~tracefp4.models.sites.Heads`, a tuple, so constant for a compiler."""


class HeadsHook:
    """An attention module that hands its projections to its site object, until :meth:`remove`.

    Args:
        module: bound to a :class:`~tracefp4.models.sites.ProjectingSite`.
        heads: what :func:`heads_of` says of it.
    """

    def __init__(self, module: Any, heads: Heads) -> None:
        self._module = module
        object.__setattr__(module, _HEADS, heads)
        # Bound to the module, as the compiler expects of a forward: all layers share one compiled graph.
        object.__setattr__(module, "forward", types.MethodType(_forward, module))

    def remove(self) -> None:
        """Let the class's own forward be the module's again."""
        object.__delattr__(self._module, "forward")
        object.__delattr__(self._module, _HEADS)


def hook(module: Any, angles: int | None = None) -> HeadsHook | None:
    """Let a bound attention module hand over its projections, if it is the picture above.

    Args:
        module: the module, with its weights.
        angles: values of a head that the model turns; ``None`` for all.
    """
    heads = None if "forward" in vars(module) else heads_of(module, angles)
    return None if heads is None else HeadsHook(module, heads)


def _forward(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """The module's own forward, or the picture above with the site object in its middle."""
    heads: Heads = getattr(module, _HEADS)
    x, turn, traced = kwargs.get("hidden_states"), kwargs.get("position_embeddings"), torch.compiler.is_compiling()
    # A cache that an engine passes keeps no K and V: its site objects do. Another basis of keys is the module's matter.
    own = bool(args) or kwargs.get("attention_mask") is not None or basis_of(module) is not None
    if own or x is None or turn is None or turn[0].shape[-1] != heads[3]:
        return type(module).forward(module, *args, **kwargs)
    # A graph that is traced serves every layer of its kind, so it asks the site object when it runs.
    if not traced and not site_of(module).takes_heads():
        return type(module).forward(module, *args, **kwargs)
    q, k, v = module.q_proj(x), module.k_proj(x), module.v_proj(x)
    if traced:
        out = opaque.attend_heads(q, k, v, *turn, getattr(module, opaque.KEY), heads[0] * heads[2])
    else:
        refuse_autocast(x)
        out = attend(module, q, k, v, *turn)
    return module.o_proj(_gated(heads, out, q)), None


def _gated(heads: Heads, out: Tensor, q: Tensor) -> Tensor:
    """Results ``(B, S, Hq D)`` times the sigmoid of the gates beside the queries, if there are any."""
    if not heads[4]:
        return out
    return out * torch.sigmoid(q.unflatten(2, (heads[0], -1))[..., heads[2] :].flatten(2))


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Norms, rotary embedding and attention of projected rows through the site object of ``module``.

    Args:
        module: an attention module that was hooked.
        q: ``(B, S, Hq D)`` as it was projected; with gates ``(B, S, Hq 2 D)``, each head's behind its values.
        k: ``(B, S, Hk D)``.
        v: ``(B, S, Hk D)``.
        cos: ``(B or 1, S, R)``.
        sin: likewise.

    Returns:
        ``(B, S, Hq D)``, not yet gated.
    """
    heads: Heads = getattr(module, _HEADS)
    site = site_of(module)
    q, k, v = _cut(heads, q, k, v)
    out = site.attend_heads(module, heads, q, k, v, cos, sin)
    if out is None:
        parts = _parts(module, heads, q, k, v, cos, sin)
        out = site.attend(module, *parts, scaling=heads.scaling, window=heads.window, sinks=None)
    return out.flatten(2)


def _cut(heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads ``(B, S, H, D)`` of projected rows, views."""
    q = q.unflatten(2, (heads.queries, -1))[..., : heads.width]
    return q, k.unflatten(2, (heads.keys, -1)), v.unflatten(2, (heads.keys, -1))


def _parts(
    module: Any, heads: Heads, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``(B, H, S, D)`` of their heads ``(B, S, H, D)``, step by step."""
    if heads.eps is not None:
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
def heads_of(module: Any, angles: int | None = None) -> Heads | None:
    """Sizes of a bound attention module that is the picture above to the last bit; ``None`` for any other.

    Args:
        module: the module, with its weights.
        angles: values of a head that the model turns; ``None`` for all.
    """
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    projections: list[Any] = [getattr(module, name, None) for name in names]
    width = getattr(module, "head_dim", None)
    if not all(type(p) is nn.Linear and not p.weight.is_meta for p in projections) or not isinstance(width, int):
        return None
    pair = [getattr(module, name) for name in ("q_norm", "k_norm") if getattr(module, name, None) is not None]
    forms = [norms.form_of(n) if n.weight.numel() == width else None for n in pair]
    part = width if angles is None else angles
    if len(pair) == 1 or None in forms or len(set(forms)) > 1 or part % 2 or not 0 < part <= width:
        return None
    weight, generator = projections[0].weight, torch.Generator().manual_seed(0)
    x, cos, sin = (
        torch.randn(2, 3, n, generator=generator).to(weight.device, weight.dtype) for n in (weight.shape[1], part, part)
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
    form, gated = forms[0] if forms else None, projections[0].out_features == 2 * queries * width
    eps, added = (None, False) if form is None else form
    heads = Heads(queries, keys, width, part, gated, eps, added, float(scaling), window)
    sizes = (queries * (1 + gated), keys, keys)
    if sinks is not None or any(p.out_features != n * width for p, n in zip(projections[:3], sizes, strict=True)):
        return None
    q, k, v, o = projections
    rows = q(x), k(x), v(x)
    expected = _parts(module, heads, *_cut(heads, *rows), cos, sin)
    # Weights that are not loaded yet would make everything equal.
    same = all(a.shape == b.shape and torch.equal(a, b) and a.any() for a, b in zip(given, expected, strict=True))
    return heads if same and torch.equal(found[0], o(_gated(heads, probe.answer.flatten(2), rows[0]))) else None
