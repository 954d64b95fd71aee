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
from torch import Tensor, nn

from tracefp4.models import opaque
from tracefp4.models.experts import site_of


class StepHook:
    """A module whose forward is replaced, until :meth:`remove`.

    Args:
        module: a gated delta net of :data:`tracefp4.models.layout.DELTA_NETS`, bound.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Bound to the module, as the compiler expects of a forward: all layers share one compiled graph.
        object.__setattr__(module, "forward", types.MethodType(_forward, module))

    def remove(self) -> None:
        """Let the class's own forward be the module's again."""
        object.__delattr__(self._module, "forward")


def _forward(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Output ``(B, S, H)`` for ``hidden_states (B, S, H)``; other arguments are those of transformers."""
    # Only an engine compiles, and only its steps.
    traced = torch.compiler.is_compiling()
    if not traced and not site_of(module).steps:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    mixed, z, a, b = _project(module, hidden_states)
    if traced:
        out = opaque.delta(mixed, a, b, getattr(module, opaque.KEY), module.value_dim)
    else:
        out = step(module, mixed, a, b)
    out = module.norm(out.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
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
    """``(q, k and v side by side, z, a, b)``; Qwen3-Next projects them together, interleaved by key head."""
    if hasattr(module, "in_proj_qkv"):
        return module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_a(x), module.in_proj_b(x)
    q, k, v, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
    return torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1), z, a, b
