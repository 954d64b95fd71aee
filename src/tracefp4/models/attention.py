"""The attention function, and the attention arithmetic that both sides share.

Transformers hands us queries, keys after RoPE and values of the current tokens; what they attend to is the business of
the site object: the trainer's fake-quantizes K and V of the whole sequence, the engine's writes them to its pool and
reads the pool back. Both then call :func:`dense_attention`, so that a difference between them is one of values, never
of arithmetic.

No mask is built. Training batches are right-padded, where causality alone keeps real tokens from seeing padding, and
the engine knows the lengths of its own sequences. A left-padded attention mask is refused rather than ignored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tracefp4.errors import ModelError
from tracefp4.models import opaque
from tracefp4.models.experts import NAME, refuse_autocast, site_of
from tracefp4.models.key_basis import basis_of
from tracefp4.models.sites import AttentionSite

QUERY_BLOCK = 512
"""Queries for which written-out attention holds float32 logits at a time."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention through its site object.

    Args:
        module: the attention module, bound.
        query: ``(B, Hq, S, D)`` after RoPE.
        key: ``(B, Hkv, S, D)`` after RoPE.
        value: ``(B, Hkv, S, Dv)``.
        attention_mask: ``None``; see the module's text.
        scaling: factor on the logits; ``D ** -0.5`` if ``None``.
        dropout: 0.
        sliding_window: tokens that a token sees, itself included, or ``None``.
        s_aux: ``(Hq,)`` attention-sink logits or ``None``.
        **kwargs: position ids and the like, not used.

    Returns:
        ``(B, S, Hq, Dv)`` and no attention weights.

    Raises:
        ModelError: unbound, under autocast, or asked for something that changes the result and is not supported.
    """
    name = type(module).__name__
    compiling = torch.compiler.is_compiling()
    if not compiling:
        refuse_autocast(query)
    if attention_mask is not None:
        raise ModelError(f"{name}: 4-D attention masks are not supported; pass right-padded batches")
    if dropout:
        raise ModelError(f"{name}: attention dropout is {dropout}, but both sides must compute the same; set it to 0")
    for unsupported in ("softcap", "position_bias"):
        if kwargs.get(unsupported) is not None:
            raise ModelError(f"{name}: attention with {unsupported} is not supported")
    if key.shape[2] != query.shape[2]:
        raise ModelError(
            f"{name}: {key.shape[2]} keys for {query.shape[2]} queries; pass use_cache=False, sites keep their own"
        )
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    basis = basis_of(module)
    if basis is not None:
        query, key = basis.queries(query), basis.keys(key)
    if compiling:
        return opaque.attend(query, key, value, getattr(module, opaque.KEY), factor, sliding_window, s_aux), None
    site: AttentionSite = site_of(module)
    out = site.attend(module, query, key, value, scaling=factor, window=sliding_window, sinks=s_aux)
    return out, None


def no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """Build no mask; the entry for transformers' registry of mask functions.

    Args:
        attention_mask: ``(B, S)`` bool, true where a token is real, as the user passed it to the model. Checking it
            costs one synchronisation on CUDA: leave it out in a hot path.

    Raises:
        ModelError: a token follows padding.
    """
    if attention_mask is None or attention_mask.ndim != 2 or torch.compiler.is_compiling():
        return
    if bool((attention_mask[:, 1:] & ~attention_mask[:, :-1]).any()):
        raise ModelError("the attention mask has padding before tokens; pad on the right (padding_side='right')")


def register() -> None:
    """Register both functions with transformers under :data:`NAME`; again is harmless."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention over dense K and V.

    Without sinks and window it is torch's ``scaled_dot_product_attention``, K and V not repeated for grouped queries;
    otherwise logits and softmax are computed in float32 and the probabilities rounded to the dtype of ``v``.

    Args:
        q: ``(B, Hq, Sq, D)``.
        k: ``(B, Hkv, Sk, D)``, ``Hq`` a multiple of ``Hkv``.
        v: ``(B, Hkv, Sk, Dv)``.
        scaling: factor on the logits.
        window: a query sees this many tokens, itself included; ``None`` for all.
        sinks: ``(Hq,)`` logits that take part in the softmax and have no value; ``None`` for none.
        mask: bool, broadcastable to ``(B, 1, Sq, Sk)``, true where a query may look, which has to be at least one key
            for each query. It is taken as it is: neither causality nor ``window`` is added. ``None``: causal, the last
            query standing at the last key.

    Returns:
        ``(B, Sq, Hq, Dv)`` in the dtype of ``q``.
    """
    queries, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    explicit = sinks is not None or window is not None
    if explicit and mask is None and queries > QUERY_BLOCK:
        return _blocks(q, k, v, scaling, window, sinks)
    if mask is None and (queries != keys or explicit):
        mask = causal_mask(queries, keys, window, q.device)
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, scale=scaling, enable_gqa=groups > 1)
        return out.transpose(1, 2)
    # The queries of a group become more queries of one head: K and V are never repeated, and any kernel can be chosen.
    packed = q.reshape(q.shape[0], k.shape[1], groups * queries, q.shape[3])
    if queries > 1 and mask.shape[-2] > 1:
        mask = mask.repeat(1, 1, groups, 1)
    if explicit:
        out = _explicit(packed, k, v, scaling, _packed_sinks(sinks, k.shape[1], queries), mask)
    else:
        out = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(q.shape[0], q.shape[1], queries, v.shape[3]).transpose(1, 2)


def _blocks(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """Causal attention in blocks of queries, each with only the keys that it may see."""
    queries, before = q.shape[2], k.shape[2] - q.shape[2]
    parts = []
    for start in range(0, queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, queries)
        seen = slice(0 if window is None else max(0, before + start - window + 1), before + stop)
        part = q[:, :, start:stop], k[:, :, seen], v[:, :, seen]
        parts.append(dense_attention(*part, scaling=scaling, window=window, sinks=sinks))
    return torch.cat(parts, dim=1)


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a bool mask ``(1, 1, queries, keys)``, true where a query may look; the last query is at the last key."""
    here = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    there = torch.arange(keys, device=device)
    mask = there <= here
    if window is not None:
        mask &= there > here - window
    return mask.view(1, 1, queries, keys)


def _packed_sinks(sinks: Tensor | None, kv_heads: int, queries: int) -> Tensor | None:
    """Sinks in the layout of packed queries: ``(1, Hkv, groups * Sq, 1)``."""
    if sinks is None:
        return None
    return sinks.view(1, kv_heads, -1, 1).expand(-1, -1, -1, queries).reshape(1, kv_heads, -1, 1)


def _explicit(q: Tensor, k: Tensor, v: Tensor, scaling: float, sinks: Tensor | None, mask: Tensor) -> Tensor:
    """Attention written out; softmax in float32 (float64 inputs: float64)."""
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    logits = torch.matmul(q.to(wide), k.to(wide).transpose(2, 3)) * scaling
    logits = logits.masked_fill(~mask, float("-inf"))
    total = torch.logsumexp(logits, -1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(wide))
    return torch.matmul(torch.exp(logits - total).to(v.dtype), v)
