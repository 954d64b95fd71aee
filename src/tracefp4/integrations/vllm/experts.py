"""Routed experts inside vLLM: our W4A4 on any device, or vLLM's own kernels, both with the routes recorded.

:class:`EmulatedMethod` has vLLM's router before it and vLLM's activation kernel inside; the arithmetic between is
:class:`~tracefp4.integrations.engines.experts.EmulatedExperts`. Weights are packed when they have been loaded, from the
bfloat16 tensors that the trainer quantizes too, unless they come packed.

:class:`PlainMethod` is vLLM's unquantized path, for specs that leave the experts alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs

from tracefp4.core import Site
from tracefp4.errors import EngineError, ModelError
from tracefp4.formats.spec import Spec
from tracefp4.guidance.rounding import round_nearest
from tracefp4.integrations.engines.experts import EmulatedExperts
from tracefp4.integrations.vllm.session import installed
from tracefp4.models.sites import Operand

WEIGHTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Our names of the two stacked weights, and vLLM's."""


def layer_of(layer: Any) -> int:
    """Decoder layer of one of vLLM's layers, from its name."""
    return extract_layer_index(str(layer.layer_name))


class EmulatedMethod(FusedMoEMethodBase):
    """W4A4, W4A8 or W4A16 by the spec's numerics, exact on every device.

    Args:
        moe: vLLM's description of the layer.
        spec: numerics of weights and activations.

    Raises:
        ModelError: experts that are split over devices, biased or without a gate.
    """

    def __init__(self, moe: FusedMoEConfig, spec: Spec) -> None:
        super().__init__(moe)
        self.spec = spec
        self.experts: EmulatedExperts | None = None
        parallel = moe.moe_parallel_config
        if parallel.tp_size * parallel.dp_size * parallel.ep_size != 1:
            raise ModelError("emulated experts are not split over devices: set tensor and data parallel size to 1")
        if moe.has_bias or not moe.is_act_and_mul:
            raise ModelError("emulated experts have a gate and no biases, this model's differ; use engine 'embedded'")

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the two stacked weights that vLLM's loader fills."""
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, extra_weight_attrs)

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        """None of vLLM's kernels runs here."""
        return FusedMoEQuantConfig.make()

    @torch.no_grad()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack what was loaded, but for what came packed. Called again after every weight update."""

        def activate(gate_up: Tensor) -> Tensor:
            out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
            return apply_moe_activation(layer.activation, out, gate_up)

        if self.experts is None:
            self.experts = EmulatedExperts(layer_of(layer), self.spec.weights, self._quantize, activate)
        self.experts.load(layer.w13_weight, layer.w2_weight)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Routed experts of ``x (T, H)`` with gate values and ids ``(T, K)``; ``(T, H)`` in the dtype of ``x``."""
        if self.experts is None:
            raise EngineError(f"{layer.layer_name}: experts were called before their weights were loaded")
        _route(layer, topk_ids)
        return self.experts(x, topk_ids, topk_weights)

    def _quantize(self, site: Site, x: Tensor, pairs: Tensor | None) -> Operand:
        found, numerics = installed(), self.spec.for_kind(site.kind)
        if found is not None:
            return found.recorder.quantize(site, x, pairs)
        if numerics is None:
            return Operand(x, None)
        # vLLM runs the model to measure memory before there is a recorder.
        q = round_nearest(x, numerics)
        return Operand(q.factor(), q.decode_scale())


class PlainMethod(UnquantizedFusedMoEMethod):
    """vLLM's unquantized experts; the weights as they were loaded are kept beside vLLM's repacked ones."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the loaded weights and let vLLM repack. Called again after every weight update."""
        layer.tracefp4_loaded = {name: getattr(layer, name) for name in WEIGHTS.values()}
        for name, loaded in layer.tracefp4_loaded.items():
            layer.register_parameter(name, nn.Parameter(loaded.data.clone(), requires_grad=False))
        # vLLM repacks only when it builds its kernel.
        self.moe_kernel = None
        super().process_weights_after_loading(layer)

    def restore(self, layer: Any) -> None:
        """Put the loaded weights back into the layer, for vLLM's loader to write the next ones into."""
        for name, parameter in layer.tracefp4_loaded.items():
            layer.register_parameter(name, parameter)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """As vLLM's, with the routes recorded."""
        _route(layer, topk_ids)
        return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)


def _route(layer: Any, chosen: Tensor) -> None:
    found = installed()
    if found is not None:
        found.recorder.route(layer_of(layer), chosen)
