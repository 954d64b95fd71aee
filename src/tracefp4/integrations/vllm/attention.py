"""NVFP4 KV cache on a CPU: K and V are rounded on their way into vLLM's cache.

vLLM's CPU backend stores K and V in the model's dtype and reads nothing else, not even for the token that was written a
moment ago. Every ``code x block scale`` of our KV numerics is exact in bfloat16, so a cache that holds rounded values
holds what an FP4 cache would decode to: attention over it is attention over FP4, by vLLM's own kernel, in both phases.
What is emulated is the memory saved, not the arithmetic.

The codes and scales are kept beside the cache in rows of the same slots (:class:`~tracefp4.rollout.pool.KVPool`), which
is where guidance of K and V comes from.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from tracefp4.integrations.vllm.experts import layer_of
from tracefp4.integrations.vllm.quantization import TraceConfig
from tracefp4.integrations.vllm.session import recorder


class TraceAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our write to the cache."""

    @staticmethod
    def get_impl_cls() -> type[TraceAttention]:
        """The implementation."""
        return TraceAttention


class TraceAttention(CPUAttentionBackendImpl):
    """Rounds K and V where the model was loaded with our quantization method; else it is vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.traced = isinstance(get_current_vllm_config().quant_config, TraceConfig)

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Round if the spec says so, keep codes and scales by slot, and write.

        Args:
            layer: vLLM's attention layer.
            key: ``(T, Hkv, D)`` after RoPE.
            value: ``(T, Hkv, D)``.
            kv_cache: the layer's cache.
            slot_mapping: ``(T,)`` slots.
        """
        if self.traced:
            key, value = recorder().key_value(layer_of(layer), slot_mapping, key, value)
        super().do_kv_cache_update(layer, key.contiguous(), value.contiguous(), kv_cache, slot_mapping)
