"""Looking on where SGLang rounds to FP4 itself, on Blackwell: nothing is computed here, codes are read.

The experts' input is quantized by a function of its own in some backends (:mod:`tracefp4.integrations.sglang.native`).
Hooked after it, :class:`Watch` sees its result; the layer, which is no argument there, is noted on the way into the
experts. K and V lie in SGLang's own pool as packed codes and scales, and :class:`NativePool` reads them by slot when a
request ends.

Written against the source of SGLang 0.5.23 and tested with stand-ins of its signatures. It has not run on the hardware,
and the capability table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Kind, Site
from tracefp4.errors import EngineError
from tracefp4.formats import e2m1
from tracefp4.formats.blocks import Quantized
from tracefp4.integrations.engines.recorder import Recorder

_LAYER: ContextVar[int | None] = ContextVar("tracefp4_layer", default=None)
"""The experts that are being computed; fixed when a CUDA graph is captured."""


def note_layer(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``FusedMoE.forward_impl(self, hidden_states, topk_output)``."""
    token = _LAYER.set(int(module.layer_id))
    try:
        return original(module, *args, **kwargs)
    finally:
        _LAYER.reset(token)


class Watch:
    """Hooks after SGLang's quantizers.

    Args:
        recorder: gives the recorder, which is made after the hooks are.
    """

    def __init__(self, recorder: Callable[[], Recorder]) -> None:
        self._recorder = recorder

    def hidden_states(self, result: tuple[Tensor, Tensor], x: Tensor, scale: Tensor, *_: Any, **__: Any) -> None:
        """After ``quantize_hidden_states_fp4(hidden_states, input_scale_quant)``: linear scales, one scalar scale."""
        self._see(result[0], result[1], scale, encode=True)

    def fp4_quantize(self, result: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> None:
        """After ``fp4_quantize(input, global_scale, sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout, ...)``.

        Calls outside of experts are not ours; a swizzled layout is turned into rows.
        """
        if _LAYER.get() is None:
            return
        x, scale = (args[0] if args else kwargs["input"]), (args[1] if len(args) > 1 else kwargs["global_scale"])
        swizzled = args[4] if len(args) > 4 else kwargs.get("is_sf_swizzled_layout", True)
        blocks = x.shape[-1] // 16
        scales = linear_scales(result[1], x.shape[0], blocks) if swizzled else result[1]
        self._see(result[0], scales, scale, encode=True)

    def per_token(self, result: tuple[Tensor, Tensor, Tensor], *_: Any, **__: Any) -> None:
        """After ``nvfp4_quantize(..., per_token_activation=True)``: one FP32 decode scale a token."""
        if _LAYER.get() is not None and len(result) > 2:
            self._see(result[0], result[1], result[2], encode=False)

    def _see(self, packed: Tensor, scales: Tensor, scale: Tensor, *, encode: bool) -> None:
        layer = _LAYER.get()
        if layer is None:
            return
        recorder = self._recorder()
        numerics = recorder.spec.activations
        if numerics is None:
            return
        width = recorder.layout.hidden
        codes = e2m1.unpack(packed.view(torch.uint8).reshape(-1, packed.shape[-1])[:, : width // 2])
        rows = codes.shape[0]
        value = scale.float().reshape(-1, 1).expand(rows, 1)
        if encode != (numerics.global_form == "encode"):
            value = torch.reciprocal(value)
        found = scales.view(torch.uint8).reshape(rows, -1)[:, : width // numerics.block]
        recorder.observe(Site(layer, Kind.EXPERTS_IN), Quantized(codes, found, value.contiguous(), numerics))


class NativePool:
    """SGLang's own NVFP4 pool, read as :meth:`tracefp4.rollout.pool.KVPool.stored` is.

    Args:
        find: gives ``token_to_kv_pool``, with ``k_buffer`` and ``k_scale_buffer`` by layer, the first axis the slot.
    """

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find

    def stored(self, layers: Sequence[int], kind: Kind, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Packed codes ``(L, T, heads, width / 2)`` and scale bytes ``(L, T, heads, width / 16)`` of ``slots (T,)``.

        Raises:
            EngineError: scales that only exist in the layout of a kernel.
        """
        pool, name = self._find(), str(kind)
        codes, scales = getattr(pool, f"{name}_buffer"), getattr(pool, f"{name}_scale_buffer")
        if scales is None:
            raise EngineError(
                f"layer {layers[0]}: SGLang keeps the scales of {kind} in its kernel's own layout alone, which is not "
                "read; use a prefill backend that needs linear scales (--prefill-attention-backend flashinfer)"
            )
        index = [layer - pool.start_layer for layer in layers]
        slots = slots.to(codes[index[0]].device)
        packed, found = (
            torch.stack([part[i].view(torch.uint8).index_select(0, slots) for i in index]) for part in (codes, scales)
        )
        return packed, found.reshape(*packed.shape[:3], -1)


def linear_scales(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """Rows of scales ``(rows, blocks)`` out of the layout that Blackwell's matrix units read.

    That layout has tiles of 128 rows and 4 blocks. In a tile the scale of row ``r`` and block ``b`` stands at
    ``(r % 32) * 16 + (r // 32) * 4 + b``; tiles follow one another along the blocks first. Both axes are padded to
    whole tiles.
    """
    high, wide = -(-rows // 128), -(-blocks // 4)
    tiles = swizzled.view(torch.uint8).reshape(high, wide, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)[:rows, :blocks].contiguous()
