"""Multi-head latent attention: quantizing the compressed KV vector.

DeepSeek-V3 caches, for each token, one *latent* vector of ``r`` values from which the keys and values of all heads are
expanded, and one rotated key part that all heads share (DeepSeek-V2, arXiv 2405.04434, section 2.1)::

    latent (B, S, r) = kv_a_layernorm(...)       -> site.latent quantizes here
    k_nope (B, H, S, Dn), v (B, H, S, Dv) = kv_b_proj(latent)
    k = [k_nope, k_rope]                          k_rope (B, 1, S, Dr) the same for every head, quantized in site.attend

What a cache would store is what must be quantized: the latent after its norm, and the rotated part. The attention
function sees only the expanded keys, so the latent is reached by a hook on the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tracefp4.models import opaque
from tracefp4.models.experts import site_of


def hook_latent(norm: nn.Module, attention: nn.Module) -> RemovableHandle:
    """Pass the output of ``norm`` through ``latent`` of the site object of ``attention``.

    Args:
        norm: the module that normalises the latent vector, output ``(B, S, r)``.
        attention: the attention module that owns it, bound.

    Returns:
        The handle that removes the hook.
    """

    def quantize(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return opaque.latent(output, getattr(attention, opaque.KEY))
        return site_of(attention).latent(output)

    return norm.register_forward_hook(quantize)


def expand_latent(module: Any, latent: Tensor) -> tuple[Tensor, Tensor]:
    """Expand latent vectors to the unrotated keys and the values of every head.

    Args:
        module: the attention module.
        latent: ``(B, S, r)``, of any tokens: those of the current forward or cached ones.

    Returns:
        ``k_nope (B, H, S, Dn)`` and ``v (B, H, S, Dv)``.
    """
    batch, length, _ = latent.shape
    heads = module.kv_b_proj(latent).view(batch, length, -1, module.qk_nope_head_dim + module.v_head_dim)
    k_nope, v = heads.transpose(1, 2).split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
    return k_nope, v


def rope_part(module: Any, k: Tensor) -> Tensor:
    """Return the rotated part ``(B, 1, S, Dr)`` of expanded keys ``k (B, H, S, Dn + Dr)``, the same in all heads."""
    return k[:, :1, :, module.qk_nope_head_dim :]


def join_rope(k_nope: Tensor, k_rope: Tensor) -> Tensor:
    """Return keys ``(B, H, S, Dn + Dr)`` from ``k_nope (B, H, S, Dn)`` and ``k_rope (B, 1, S, Dr)``."""
    return torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)], dim=-1)
