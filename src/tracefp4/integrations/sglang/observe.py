"""Looking on where SGLang rounds to FP4 itself, on Blackwell: nothing is computed here, codes are read.

:class:`Watch` has a hook for each quantizer that is a call of its own (:mod:`tracefp4.integrations.sglang.native`);
what it sees goes to the common :class:`~tracefp4.integrations.engines.looking.Looker`. K and V lie in SGLang's own pool
as packed codes and scales, and :class:`NativePool` reads them by slot when a request ends.

Written against the source of SGLang 0.5.23 and tested with stand-ins of its signatures. It has not run on the hardware,
and the capability table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Kind
from tracefp4.errors import EngineError
from tracefp4.integrations.engines.looking import Grouped, Looker
from tracefp4.integrations.engines.recorder import Recorder


class Watch:
    """Hooks around SGLang's experts and behind its quantizers.

    Args:
        recorder: see :class:`~tracefp4.integrations.engines.looking.Looker`.
    """

    def __init__(self, recorder: Callable[[], Recorder | None]) -> None:
        self.looker = Looker(recorder)

    def experts(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Around ``FusedMoE.forward_impl(self, hidden_states, topk_output)``: the layer, which no quantizer knows."""
        with self.looker.inside(int(module.layer_id), module):
            return original(module, *args, **kwargs)

    def fp4_quantize(self, result: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> None:
        """After ``fp4_quantize(input, global_scale, sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout, ...)``."""
        if self.looker.here is None:
            return
        scale = args[1] if len(args) > 1 else kwargs["global_scale"]
        tiled = args[4] if len(args) > 4 else kwargs.get("is_sf_swizzled_layout", True)
        self.looker.rows(result[0], result[1], scale, encode=True, tiled=bool(tiled))

    def per_token(self, result: tuple[Tensor, ...], *_: Any, **__: Any) -> None:
        """After ``nvfp4_quantize(..., per_token_activation=True)``: one FP32 decode scale a token, linear scales."""
        if len(result) > 2:
            self.looker.rows(result[0], result[1], result[2], encode=False)

    # -- CuteDSL's masked kernels behind DeepEP's low latency dispatch

    def dispatched(self, result: Any, dispatcher: Any, *args: Any, **kwargs: Any) -> None:
        """After ``_DeepEPDispatcherImplLowLatency.dispatch_b(self, ...)``, whose handle says whose each row is.

        Raises:
            EngineError: more than one rank; rows of tokens of another rank would belong into its record.
        """
        here = self.looker.here
        if here is None:
            return
        if dispatcher.group.size() != 1:
            raise EngineError(
                f"layer {here.layer}: DeepEP spreads tokens over {dispatcher.group.size()} ranks, and each records its "
                "own tokens alone; use one rank, or another backend"
            )
        # Codes come as (capacity, width / 2, E), values as (E, capacity, width).
        capacity = result.hidden_states.shape[1 if result.hidden_states_scale is None else 0]
        here.grouped = Grouped.masked(dispatcher.handle[0], result.masked_m, result.topk_ids, capacity)

    def masked(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``flashinfer_cutedsl_moe_masked(hidden_states, input_global_scale, ...)``.

        A dispatch that has rounded already brings codes ``(capacity, width / 2, E)`` and their scales along.
        """
        here, found = self.looker.here, args[0] if args else kwargs["hidden_states"]
        if here is not None and found[1] is not None:
            scale = here.module.w13_input_scale_quant
            self.looker.grouped(Kind.EXPERTS_IN, found[0], found[1], scale, batched=True)
        return original(*args, **kwargs)

    def masked_input(self, result: tuple[Tensor, Tensor], a: Tensor, mask: Tensor, a_global_sf: Tensor) -> None:
        """After ``scaled_fp4_grouped_quantize(a, mask, a_global_sf)``."""
        self.looker.grouped(Kind.EXPERTS_IN, result[0], result[1], a_global_sf, batched=True)

    def masked_middle(self, result: tuple[Tensor, Tensor], a: Tensor, mask: Tensor, a_global_sf: Tensor) -> None:
        """After ``silu_and_mul_scaled_nvfp4_experts_quantize(a, mask, a_global_sf)``."""
        self.looker.grouped(Kind.EXPERTS_MID, result[0], result[1], a_global_sf, batched=True)


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
