"""Looking on where vLLM rounds to FP4 itself: nothing is computed twice on the way, and nothing is computed here.

:class:`Watch` has a wrapper for each quantizer that is a call of its own; :mod:`tracefp4.integrations.vllm.native` says
which backend calls which, and :func:`bind` puts the wrappers in place. What they see goes to the common
:class:`~tracefp4.integrations.engines.looking.Looker`.

``moe_kernel_quantize_input`` rounds the experts' input for most backends, and both inputs for ``emulation``, which
returns values and not codes. The emulation's arithmetic is that of our preset ``nvfp4-flashinfer-fast`` under one
scalar global scale (the suite compares the two bit for bit on the function that vLLM runs off CUDA), so its codes are
made again from the same input and scale: one row a token first, then one row for each token and slot, in that order.

``cutlass`` sorts rows by expert before it rounds. It announces the order (``get_cutlass_moe_mm_data``), and scales of
each expert begin a tile of their own. CuteDSL's batched kernels have a bin for each expert, filled by DeepEP, whose
handle says whose each row is.

Written against the source of vLLM 0.32 and tested with stand-ins whose signatures are compared with it. It has not run
on the hardware, and the capability table says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Kind, Site
from tracefp4.errors import EngineError
from tracefp4.formats.blocks import Quantized, quantize
from tracefp4.formats.numerics import Numerics, get_numerics
from tracefp4.integrations.engines.looking import Grouped, Here, Looker
from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.vllm.stored import keep_globals

PRESET = "nvfp4-flashinfer-fast"
"""Numerics of vLLM's emulation."""


def emulation_numerics() -> Numerics:
    """What vLLM's emulation computes: one scalar global scale for all rows."""
    return replace(get_numerics(PRESET), scope="tensor")


def requantize(x: Tensor, encode_scale: Tensor) -> Quantized:
    """Codes and scales of vLLM's emulation.

    Args:
        x: ``(rows, width)``.
        encode_scale: vLLM's ``A_scale``, one element: what values are multiplied by.

    Returns:
        With ``global_scale (rows, 1)``, the scalar repeated, as rows with a scale of their own travel.
    """
    numerics = emulation_numerics()
    scalar = encode_scale.float().reshape(())
    primary = scalar if numerics.global_form == "encode" else torch.reciprocal(scalar)
    q = quantize(x, numerics, primary)
    return replace(q, global_scale=primary.expand(x.shape[0], 1).contiguous())


class Watch:
    """Wrappers ``(original, *arguments)`` around functions of vLLM; arguments are bound by their names there.

    Args:
        recorder: see :class:`~tracefp4.integrations.engines.looking.Looker`.
    """

    def __init__(self, recorder: Callable[[], Recorder | None]) -> None:
        self.looker = Looker(recorder)

    def experts(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Around ``RoutedExperts.forward_modular`` and ``forward_monolithic``: the layer, which no quantizer knows."""
        from vllm.model_executor.models.utils import extract_layer_index

        with self.looker.inside(extract_layer_index(str(module.layer_name)), module):
            return original(module, *args, **kwargs)

    def loaded(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``convert_to_nvfp4_moe_kernel_format``; see :func:`.stored.keep_globals`."""
        return keep_globals(original, *args, **kwargs)

    def quantize_input(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``moe_kernel_quantize_input(A, A_scale, quant_dtype, ...)``.

        Raises:
            EngineError: an emulation that rounds otherwise than vLLM 0.32 does.
        """
        here = self.looker.here
        if here is None:
            return original(*args, **kwargs)
        told = _named(original, args, kwargs)
        if told["quant_dtype"] != "nvfp4":
            return original(*args, **kwargs)
        if told["quantization_emulation"]:
            self._emulated(here, told["A"], told["A_scale"])
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        self.looker.rows(result[0], result[1], told["A_scale"], encode=True, tiled=told["is_scale_swizzled"])
        return result

    def _emulated(self, here: Here, x: Tensor, scale: Tensor | None) -> None:
        here.calls += 1
        if here.calls > 2 or scale is None or scale.numel() != 1:
            raise EngineError(
                f"layer {here.layer}: call {here.calls} of vLLM's quantizer, with "
                f"{0 if scale is None else scale.numel()} scales, is not known; expected are two in a layer, with one "
                "scalar each"
            )
        recorder = self.looker.recorder()
        if recorder is None:
            return
        if here.calls == 1:
            recorder.observe(Site(here.layer, Kind.EXPERTS_IN), requantize(x, scale))
        else:
            pairs = torch.arange(x.shape[0], device=x.device)
            recorder.observe(Site(here.layer, Kind.EXPERTS_MID), requantize(x, scale), pairs)

    def per_token(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``quantize_nvfp4_per_token_input(hidden_states)``: one FP32 decode scale a token, linear scales."""
        result = original(*args, **kwargs)
        self.looker.rows(result[0], result[1], result[2], encode=False)
        return result

    # -- cutlass: rows sorted by expert

    def order(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``get_cutlass_moe_mm_data(topk_ids, ...)``, which fills the permutation and offsets it is given."""
        result, here = original(*args, **kwargs), self.looker.here
        if here is not None:
            told = _named(original, args, kwargs)
            if told["blockscale_offsets"] is not None:
                here.grouped = Grouped.sorted(
                    told["output_permutation"], told["topk_ids"], told["expert_offsets"], told["blockscale_offsets"]
                )
        return result

    def sorted_input(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``scaled_fp4_experts_quant(input_tensor, input_global_scale, ...)``.

        First it rounds the experts' input; then, where the activation is not fused with it, the input of the down
        projection.
        """
        result, here = original(*args, **kwargs), self.looker.here
        if here is not None:
            here.calls += 1
            kind = Kind.EXPERTS_IN if here.calls == 1 else Kind.EXPERTS_MID
            self.looker.grouped(kind, result[0], result[1], _named(original, args, kwargs)["input_global_scale"])
        return result

    def sorted_middle(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``silu_and_mul_scaled_fp4_experts_quant(input_tensor, input_global_scale, ...)``."""
        result = original(*args, **kwargs)
        if self.looker.here is not None:
            scale = _named(original, args, kwargs)["input_global_scale"]
            self.looker.grouped(Kind.EXPERTS_MID, result[0], result[1], scale)
        return result

    # -- CuteDSL batched: a bin for each expert

    def dispatched(self, original: Callable[..., Any], dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
        """Around ``DeepEPLLPrepareAndFinalize.prepare_async(self, a1, topk_weights, topk_ids, ...)``.

        Raises:
            EngineError: more than one rank; rows of tokens of another rank would belong into its record.
        """
        result, here = original(dispatcher, *args, **kwargs), self.looker.here
        if here is not None:
            if dispatcher.num_dispatchers() != 1:
                raise EngineError(
                    f"layer {here.layer}: DeepEP spreads tokens over {dispatcher.num_dispatchers()} ranks, and each "
                    "records its own tokens alone; use one rank, or another backend"
                )
            told = _named(original, (dispatcher, *args), kwargs)
            handle = next(held for held in dispatcher.handles if held is not None)
            here.dispatch = handle, told["topk_ids"], told["quant_config"].a1_gscale
        return result

    def masked(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``flashinfer_cutedsl_moe_masked(hidden_states, ..., masked_m, ...)``.

        A dispatch that has rounded already brings codes ``(E, capacity, width / 2)`` and their scales along.
        """
        here = self.looker.here
        if here is not None and here.dispatch is not None:
            told = _named(original, args, kwargs)
            (source, *_), chosen, scale = here.dispatch
            x = told["hidden_states"]
            values = x[0] if isinstance(x, tuple) else x
            here.grouped = Grouped.masked(source, told["masked_m"], chosen, values.shape[1])
            if isinstance(x, tuple) and scale is not None:
                self.looker.grouped(Kind.EXPERTS_IN, x[0].permute(1, 2, 0), x[1], scale, batched=True)
        return original(*args, **kwargs)

    def masked_input(self, original: Callable[..., Any], a: Tensor, mask: Tensor, scale: Tensor) -> Any:
        """Around ``scaled_fp4_grouped_quantize(a, mask, a_global_sf)``."""
        result = original(a, mask, scale)
        self.looker.grouped(Kind.EXPERTS_IN, result[0], result[1], scale, batched=True)
        return result

    def masked_middle(self, original: Callable[..., Any], a: Tensor, mask: Tensor, scale: Tensor) -> Any:
        """Around ``silu_and_mul_scaled_nvfp4_experts_quantize(a, mask, a_global_sf)``."""
        result = original(a, mask, scale)
        self.looker.grouped(Kind.EXPERTS_MID, result[0], result[1], scale, batched=True)
        return result


def _named(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, defaults included."""
    told = inspect.signature(original).bind(*args, **kwargs)
    told.apply_defaults()
    return told.arguments
