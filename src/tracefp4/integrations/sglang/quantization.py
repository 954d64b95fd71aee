"""A quantization method of SGLang: routed experts in our W4A4, every other layer as the checkpoint has it.

It is SGLang's method for unquantized experts in all but one thing, the product: weights are created, sharded, loaded
and restored by SGLang's own code, packed by ours once they have been loaded (or placed packed), and multiplied by
:class:`~tracefp4.integrations.engines.experts.EmulatedExperts`. The activation between the two projections is SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from torch import nn

from tracefp4.errors import EngineError
from tracefp4.integrations.engines.experts import EmulatedExperts
from tracefp4.integrations.sglang.worker import KEY, layer_of, worker


class TraceConfig(QuantizationConfig):
    """``--quantization tracefp4``. What is quantized comes from the engine settings, not from the checkpoint."""

    @classmethod
    def get_name(cls) -> str:
        """Name of the method."""
        return KEY

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of a model that can be served; float32 to check something without rounding noise."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Every CUDA device will do."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file of the checkpoint configures it."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TraceConfig:
        """Made without arguments."""
        return cls()

    def get_scaled_act_names(self) -> list[str]:
        """No activation has a scale of its own."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for routed experts, SGLang's unquantized one for linear layers."""
        if isinstance(layer, FusedMoE):
            quantizes = worker().spec.weights is not None or worker().spec.activations is not None
            return TraceMoEMethod(layer) if quantizes else UnquantizedFusedMoEMethod()
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class TraceMoEMethod(UnquantizedFusedMoEMethod):
    """Routed experts of one layer.

    Args:
        layer: the module that they belong to.

    Raises:
        EngineError: an activation or a layout that the emulation does not compute.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        config = layer.moe_runner_config
        if config.activation != "silu" or config.gemm1_alpha is not None or config.apply_router_weight_on_input:
            raise EngineError(
                f"layer {layer_of(layer)}: experts with activation {config.activation!r} or router weights on their "
                "input are not emulated; gated SiLU is"
            )
        ours = worker()
        self.experts = EmulatedExperts(layer_of(layer), ours.spec.weights, ours.quantize, _activation())
        ours.experts[layer_of(layer)] = self.experts

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weights that were just loaded, but for those that came packed."""
        with torch.inference_mode(False), torch.no_grad():
            self.experts.load(layer.w13_weight.data, layer.w2_weight.data)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Compute the routed experts."""
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        gates, chosen, _ = dispatch_output.topk_output
        return StandardCombineInput(hidden_states=self.experts(dispatch_output.hidden_states, chosen, gates))


def _activation() -> Any:
    from sglang.srt.layers.activation import SiluAndMul

    return SiluAndMul()
