"""The FP4 KV cache, below Blackwell: K and V are rounded where they enter attention.

SGLang's own FP4 caches are kernels of Blackwell, and its registry of KV formats leads there: off CUDA it cannot be
reached without replacing its guards, and its plain path would dequantize the whole pool in every layer of every step.
So K (after RoPE) and V are rounded before attention sees them. What is cached, and what the current tokens attend to,
is ``code x block scale``, which bfloat16 holds exactly, so any attention backend computes what an FP4 cache would give
it; the codes are kept beside, by slot, and read when a request ends. It saves no memory: it is an emulation.

Kernels that write the cache while they rotate would pass by this point, so they are switched off.
"""

from __future__ import annotations

from typing import Any

from tracefp4.core import Kind
from tracefp4.errors import EngineError
from tracefp4.integrations.sglang.worker import layer_of, worker


def round_key_value(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before ``RadixAttention.forward(self, q, k, v, forward_batch, ...)``: replace ``k`` and ``v``.

    Raises:
        EngineError: attention of a kind whose cache is not emulated.
    """
    layer, q, k, v, batch, *rest = args
    ours = worker()
    if ours.spec.kv is None or not ours.recording:
        return None
    if k is None or v is None or "k_rope" in kwargs:
        raise EngineError(f"layer {layer_of(layer)}: an FP4 cache of latent or shared K and V is not emulated")
    heads = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
    values = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
    new_k, new_v = ours.recorder.key_value(layer_of(layer), batch.out_cache_loc, heads, values)
    return (layer, q, new_k.view(k.shape), new_v.view(v.shape), batch, *rest), kwargs


def no_fused_write(*args: Any, **kwargs: Any) -> bool:
    """Instead of ``enable_fused_set_kv_buffer``: K must pass through attention before it is cached."""
    return False


def no_fused_store(*args: Any, **kwargs: Any) -> None:
    """Instead of ``RotaryEmbedding.try_bf16_rope_store``."""
    return None


KINDS = (Kind.K, Kind.V)
"""Kinds of site that are met here."""
