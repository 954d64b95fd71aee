"""FP4 pages inside vLLM's KV cache: what our attention backend writes, and where guidance of K and V is read.

vLLM allocates blocks of bytes and asks the attention backend what a token takes in them. Ours answers: one row for all
heads, codes first, then scales, padded to 32 bytes so that kernels can load wide::

    [ codes of K and V: heads * head_dim | scales: 2 * heads * head_dim / block | padding ]

A layer's blocks follow one another without gaps, so a slot's row stands at ``slot * bytes`` whatever its block, and a
:class:`~tracefp4.rollout.plane.KVPlane` over the whole layer is all that is needed. Between the two arrangements of a
plane only the order of the bytes differs, never their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Kind
from tracefp4.errors import EngineError
from tracefp4.formats.numerics import Numerics
from tracefp4.rollout.plane import KVFormat, KVPlane

ALIGN = 32
"""Bytes that a row is a multiple of."""


def row_format(heads: int, width: int, numerics: Numerics, dtype: torch.dtype, device: torch.device) -> KVFormat:
    """The format of a layer with ``heads`` KV heads of ``width`` values."""
    return KVFormat.of({Kind.K: (heads, width), Kind.V: (heads, width)}, numerics, dtype, device)


def row_bytes(heads: int, width: int, block: int) -> int:
    """Bytes of a token's row in one layer.

    Raises:
        EngineError: heads that are no whole blocks.
    """
    if width % block:
        raise EngineError(f"heads of width {width} are no whole blocks of {block} values; use engine 'embedded'")
    used = heads * width + 2 * heads * width // block
    return -(-used // ALIGN) * ALIGN


def plane_of(cache: Tensor, form: KVFormat) -> KVPlane:
    """The plane over a layer's blocks.

    Args:
        cache: uint8 ``(blocks, 1, tokens of a block, bytes of a row)``, as vLLM gives it to an attention layer.
        form: of its rows.

    Raises:
        EngineError: blocks of another shape, or with gaps between them.
    """
    used = form.code_bytes + form.scale_bytes
    if cache.dtype is not torch.uint8 or cache.ndim != 4 or cache.shape[1] != 1 or cache.shape[3] < used:
        raise EngineError(
            f"FP4 pages are uint8 (blocks, 1, tokens, {used} or more), vLLM's cache is {cache.dtype} "
            f"{tuple(cache.shape)}"
        )
    blocks, _, size, width = cache.shape
    if cache.stride(3) != 1 or cache.stride(2) != width or (blocks > 1 and cache.stride(0) != size * width):
        raise EngineError(
            f"FP4 pages follow one another without gaps, vLLM's cache has strides {cache.stride()}; set "
            "VLLM_KV_CACHE_LAYOUT=LBNHC"
        )
    rows = cache.as_strided((blocks * size, width), (width, 1))
    codes = rows[:, : form.code_bytes].view(form.code_dtype)
    return KVPlane(form, codes, rows[:, form.code_bytes : used])


def has_pages(layer: Any) -> bool:
    """Whether an attention layer of vLLM keeps K and V in our pages."""
    return hasattr(layer.impl, "plane")


def read_pages(layer: Any, kind: Kind, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes and scale bytes of some slots of an attention layer with our pages; see :class:`CachePages`."""
    return layer.impl.plane(layer.kv_cache).stored(kind, slots)


class CachePages:
    """K and V of all layers in vLLM's own cache, read as :meth:`tracefp4.rollout.pool.KVPool.stored` is.

    Args:
        layers: vLLM's attention layers by decoder layer.
        read: packed codes ``(T, heads, width / 2)`` and scale bytes ``(T, heads, width / block)`` of slots ``(T,)`` in
            one attention layer.
    """

    def __init__(self, layers: Mapping[int, Any], read: Callable[[Any, Kind, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._layers, self._read = layers, read

    def stored(self, layers: Sequence[int], kind: Kind, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Packed codes ``(L, T, heads, width / 2)`` and scale bytes ``(L, T, heads, width / block)``.

        Raises:
            EngineError: a layer without a cache.
        """
        missing = [layer for layer in layers if layer not in self._layers]
        if missing:
            raise EngineError(f"layer {missing[0]} has no attention layer in vLLM, so no {kind} to read")
        slots = slots.to(self._layers[layers[0]].kv_cache.device)
        parts = [self._read(self._layers[layer], kind, slots) for layer in layers]
        return torch.stack([codes for codes, _ in parts]), torch.stack([scales for _, scales in parts])


def attention_layers(vllm_config: Any) -> dict[int, Any]:
    """Attention layers with a KV cache of their own by decoder layer."""
    from vllm.model_executor.layers.attention import Attention

    from tracefp4.integrations.vllm.experts import layer_of

    found = vllm_config.compilation_config.static_forward_context.values()
    return {layer_of(layer): layer for layer in found if isinstance(layer, Attention)}
