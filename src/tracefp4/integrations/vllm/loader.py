"""vLLM's own model loader, which also keeps the weights of linear layers.

On a CPU vLLM repacks the weight of a linear layer for its matrix kernel and drops the original. A checksum has to see
it, and the next weight update has to write it. So after loading, and before anything is repacked, every layer that vLLM
would compute unquantized gets :class:`KeptLinear`: the same kernels, with the original kept beside their copy. It costs
the memory of the dense layers once more; experts, which are most of a mixture's weights, are not concerned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform


class KeptLinear(UnquantizedLinearMethod):
    """vLLM's unquantized linear layer; on a CPU its weight stays after it was repacked."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack the weight for the CPU's kernels. Called again after every weight update."""
        if not current_platform.is_cpu():
            super().process_weights_after_loading(layer)
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


class TraceLoader(DefaultModelLoader):
    """``load_format = "tracefp4"``: vLLM's default format."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load, and keep what vLLM would drop."""
        super().load_weights(model, model_config)
        for module in model.modules():
            if isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod:
                module.quant_method = KeptLinear()
