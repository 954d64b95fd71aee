"""Looking on where vLLM rounds to FP4 itself (``--moe-backend emulation``): nothing is computed twice on the way.

vLLM's emulation rounds both inputs of the experts in one function, ``moe_kernel_quantize_input(A, A_scale, ...)``, and
returns values, not codes. Its arithmetic is that of our preset ``nvfp4-flashinfer-fast`` under one scalar global scale
(the suite compares the two bit for bit on the function that vLLM runs off CUDA), so the codes are made again from the
same input and scale. The layer, which is no argument there, is noted on the way into the experts. The first call in a
layer rounds the experts' input, one row a token; the second the input of the down projection, one row for each token
and slot, in that order.

Written against the source of vLLM 0.32 and tested with stand-ins of its signatures; the emulation needs Triton, so it
has not run here, and the capability table says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Kind, Site
from tracefp4.errors import EngineError
from tracefp4.formats.blocks import Quantized, quantize
from tracefp4.formats.numerics import Numerics, get_numerics
from tracefp4.integrations.engines.recorder import Recorder

PRESET = "nvfp4-flashinfer-fast"
"""Numerics of vLLM's emulation."""

_LAYER: ContextVar[list[int] | None] = ContextVar("tracefp4_vllm_layer", default=None)
"""Layer whose experts are being computed, and calls of the quantizer in it so far."""


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
    """Wrappers around two functions of vLLM.

    Args:
        recorder: gives the recorder, which is made after the wrappers are.
    """

    def __init__(self, recorder: Callable[[], Recorder]) -> None:
        self._recorder = recorder

    def experts(self, original: Callable[..., Any], layer: int, *args: Any, **kwargs: Any) -> Any:
        """Around the experts of a layer."""
        token = _LAYER.set([layer, 0])
        try:
            return original(*args, **kwargs)
        finally:
            _LAYER.reset(token)

    def quantize_input(self, original: Callable[..., Any], A: Tensor, A_scale: Tensor | None, *args: Any, **kw: Any):
        """Around ``moe_kernel_quantize_input``: record what it is about to round, then let it.

        Raises:
            EngineError: a third call in a layer, or no scale: another version of vLLM.
        """
        here = _LAYER.get()
        if here is not None:
            here[1] += 1
            self._see(here, A, A_scale)
        return original(A, A_scale, *args, **kw)

    def _see(self, here: list[int], x: Tensor, scale: Tensor | None) -> None:
        layer, call = here
        if call > 2 or scale is None or scale.numel() != 1:
            raise EngineError(
                f"layer {layer}: call {call} of vLLM's quantizer, with {0 if scale is None else scale.numel()} scales, "
                "is not known; expected are two in a layer, with one scalar each"
            )
        recorder, q = self._recorder(), requantize(x, scale)
        if call == 1:
            recorder.observe(Site(layer, Kind.EXPERTS_IN), q)
        else:
            recorder.observe(Site(layer, Kind.EXPERTS_MID), q, torch.arange(x.shape[0], device=x.device))
