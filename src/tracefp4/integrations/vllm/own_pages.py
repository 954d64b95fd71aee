"""VLLM's own NVFP4 KV pages (``--kv-cache-dtype nvfp4``), read: nothing is computed here.

vLLM 0.32 has them in its FlashInfer backend: TRT-LLM's kernels on SM100, FlashInfer's FA2 on Ampere, Hopper and SM120.
A page is uint8 and has four parts, one after the other, each ``(heads, tokens, n)`` or ``(tokens, heads, n)`` as the
strides of the cache say::

    [ K codes: n = D / 2 | K scales: n = D / 16 | V codes | V scales ]

The first code of a byte is its low half, and a scale is E4M3. For TRT-LLM the scales of V are moved within groups of
four tokens (:func:`~tracefp4.integrations.engines.layouts.four_token_places`); all others stand as they are. What a
value is multiplied by in addition, ``k_scale`` and ``v_scale``, is a number of the layer and has to be the constant of
the spec's KV numerics.

Read in the source of vLLM 0.32 and of its store kernels; the suite fills pages by vLLM's own views. It has not run on
the hardware, and the capability table says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Kind
from tracefp4.errors import EngineError
from tracefp4.formats.numerics import Numerics
from tracefp4.integrations.engines.layouts import four_token_places

DTYPE = "nvfp4"
"""Value of ``--kv-cache-dtype`` that is read."""
BLOCK = 16


def has_own_pages(layer: Any) -> bool:
    """Whether an attention layer of vLLM keeps K and V in NVFP4 pages of its own."""
    return bool(getattr(layer.impl, "is_kvcache_nvfp4", False))


def read_own_pages(layer: Any, kind: Kind, slots: Tensor) -> tuple[Tensor, Tensor]:
    """What some slots of an attention layer hold.

    Args:
        layer: vLLM's, with ``kv_cache (pages, 2 * heads, tokens, D / 2 + D / 16)``.
        kind: K or V.
        slots: ``(T,)`` integers on the cache's device.

    Returns:
        Packed codes ``(T, heads, D / 2)`` and scale bytes ``(T, heads, D / 16)``.

    Raises:
        EngineError: pages of another shape.
    """
    cache, impl = layer.kv_cache, layer.impl
    codes, scales = _views(cache, impl.num_kv_heads, impl.head_size, int(kind == Kind.V))
    slots = slots.to(torch.int64)
    page, token = torch.div(slots, cache.shape[2], rounding_mode="floor"), slots % cache.shape[2]
    if kind == Kind.V and not getattr(impl, "nvfp4_fa2", False):
        row, column = four_token_places(token, scales.shape[3])
        return codes[page, token], scales[page.unsqueeze(1), row, :, column].transpose(1, 2)
    return codes[page, token], scales[page, token]


def _views(cache: Tensor, heads: int, width: int, side: int) -> tuple[Tensor, Tensor]:
    """Codes ``(pages, tokens, heads, D / 2)`` and scales ``(pages, tokens, heads, D / 16)`` of K (0) or V (1)."""
    codes, scales = width // 2, width // BLOCK
    whole = codes + scales
    if cache.dtype is not torch.uint8 or cache.ndim != 4 or (cache.shape[1], cache.shape[3]) != (2 * heads, whole):
        raise EngineError(
            f"NVFP4 pages of {heads} heads of width {width} are uint8 (pages, {2 * heads}, tokens, {whole}), vLLM's "
            f"are {cache.dtype} {tuple(cache.shape)}; this is another release's layout"
        )
    pages, slots, tokens, _ = cache.shape
    by_head, by_token = (tokens * whole, whole, 1), (whole, slots * whole, 1)
    if cache.stride()[1:] not in (by_head, by_token):
        raise EngineError(f"NVFP4 pages have strides {cache.stride()}, which is another release's layout")
    start = int(cache.storage_offset()) + side * heads * tokens * whole

    def part(n: int, offset: int) -> Tensor:
        inner = (n, tokens * n) if cache.stride()[1:] == by_head else (heads * n, n)
        return cache.as_strided((pages, tokens, heads, n), (cache.stride(0), *inner, 1), offset)

    return part(codes, start), part(scales, start + heads * tokens * codes)


def check_own_pages(layers: Mapping[int, Any], wanted: Iterable[int], numerics: Numerics, heads: int) -> None:
    """Refuse pages that a plan cannot be read from.

    Args:
        layers: vLLM's attention layers.
        wanted: layers of which the plan records K or V.
        numerics: of the spec's KV cache.
        heads: KV heads of the model.

    Raises:
        EngineError: saying what differs.
    """
    if numerics.scale_format != "e4m3" or numerics.block != BLOCK or numerics.scope != "constant":
        raise EngineError(f"vLLM's own FP4 cache is NVFP4, the spec's KV numerics are {numerics.name!r}")
    for index in wanted:
        layer = layers.get(index)
        if layer is None or not has_own_pages(layer) or layer.kv_cache_dtype != DTYPE:
            held = "no cache" if layer is None else f"a cache of type {layer.kv_cache_dtype!r}"
            raise EngineError(f"layer {index} has {held} in vLLM, the plan records K and V of type {DTYPE!r}")
        if layer.impl.num_kv_heads != heads:
            raise EngineError(
                f"layer {index} has {layer.impl.num_kv_heads} of {heads} KV heads on this rank; a plan with K and V "
                "needs all of them in one process: set tensor_parallel_size to 1"
            )
        for name in ("k", "v"):
            scale = float(getattr(layer, f"_{name}_scale_float"))
            if scale != numerics.constant:
                raise EngineError(
                    f"layer {index} has {name}_scale = {scale} in vLLM, the spec's KV numerics {numerics.constant}; "
                    "the trainer has to round by the same"
                )
