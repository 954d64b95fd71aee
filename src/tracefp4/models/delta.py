"""The seam of gated delta nets: a step of one token by the engine, everything else by transformers.

Between its projections a gated delta net convolves, applies the delta rule and normalises
(:mod:`tracefp4.models.recurrence`). Transformers keeps the states in a cache object that is made for one batch. An
engine keeps them in rows of a pool and need not move them, so in a step of one token a sequence its site object does
convolution and rule where the states lie. Projections, norm and gate stay those of the module.

The forward of a bound module asks its site object whether such a step is in flight. If not, in a prefill or outside of
the engine, it runs as transformers wrote it.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from tracefp4.models import opaque
from tracefp4.models.experts import site_of

_SIZES = "tracefp4_sizes"
"""Attribute of a hooked module: key heads, value heads, width of a key, width of a value.

A tuple, which a compiler takes as constants; the module's own numbers would be inputs of the compiled layer, and what
follows from them conditions that take minutes to simplify.
"""


class StepHook:
    """A module whose forward is replaced, until :meth:`remove`.

    Args:
        module: a gated delta net of :data:`tracefp4.models.layout.DELTA_NETS`, bound.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        sizes = (module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        object.__setattr__(module, _SIZES, sizes)
        # Bound to the module, as the compiler expects of a forward: all layers share one compiled graph.
        object.__setattr__(module, "forward", types.MethodType(_forward, module))

    def remove(self) -> None:
        """Let the class's own forward be the module's again."""
        object.__delattr__(self._module, "forward")
        object.__delattr__(self._module, _SIZES)


def _forward(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Output ``(B, S, H)`` for ``hidden_states (B, S, H)``; other arguments are those of transformers."""
    # Only an engine compiles, and only its steps.
    traced = torch.compiler.is_compiling()
    if not traced and not site_of(module).steps:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    _, heads, _, width = getattr(module, _SIZES)
    mixed, z, a, b = _project(module, hidden_states)
    key = getattr(module, opaque.KEY)
    out = opaque.delta(mixed, a, b, key, heads * width) if traced else step(module, mixed, a, b)
    out = module.norm(out.reshape(-1, width), z.reshape(-1, width))
    return module.out_proj(out.reshape(hidden_states.shape[0], hidden_states.shape[1], -1))


def step(module: Any, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Convolution and delta rule of one token through the site object of ``module``.

    Args:
        module: the gated delta net.
        mixed: ``(B, 1, 2 Hk Dk + Hv Dv)``: q, k and v as they were projected.
        a: ``(B, 1, Hv)``.
        b: ``(B, 1, Hv)``.

    Returns:
        ``(B, 1, Hv Dv)``.
    """
    return site_of(module).step(module, mixed[:, 0], a[:, 0], b[:, 0]).flatten(1).unsqueeze(1)


def _project(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(q, k and v side by side, z, a, b)`` for ``x (B, 1, H)``, heads in order."""
    if hasattr(module, "in_proj_qkv"):
        return module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_a(x), module.in_proj_b(x)
    # Qwen3-Next projects all of a key head together: its q, its k, v and z of its value heads; their b and a.
    key_heads, heads, key, value = getattr(module, _SIZES)
    group = heads // key_heads
    parts = module.in_proj_qkvz(x).unflatten(2, (key_heads, 2 * key + 2 * group * value))
    q, k, v, z = (part.flatten(2) for part in parts.split((key, key, group * value, group * value), dim=-1))
    b, a = (part.flatten(2) for part in module.in_proj_ba(x).unflatten(2, (key_heads, 2 * group)).split(group, dim=-1))
    return torch.cat([q, k, v], dim=-1), z, a, b
