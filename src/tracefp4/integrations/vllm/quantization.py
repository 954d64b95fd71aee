"""The quantization method that vLLM asks which layer is computed how.

vLLM is told ``quantization = "tracefp4"`` and a ``quantization_config`` with nothing but ``{"quant_method":
"tracefp4"}``; what is quantized how comes from the settings file that all processes of an engine find
(:mod:`tracefp4.integrations.engines.settings`).

Routed experts get one of two methods of :mod:`tracefp4.integrations.vllm.experts`; every other layer stays in the
model's dtype and is computed by vLLM's own kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from tracefp4.errors import ConfigError
from tracefp4.integrations.engines.settings import VARIABLE, EngineSettings, active_settings
from tracefp4.integrations.vllm.experts import EmulatedMethod, PlainMethod
from tracefp4.integrations.vllm.plugin import METHOD


class TraceConfig(QuantizationConfig):
    """``quant_method = "tracefp4"``.

    Args:
        settings: of the engine.
    """

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        self.settings = settings

    @classmethod
    def get_name(cls) -> str:
        """Name of the method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability: the emulation is plain torch."""
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Files in the model's folder that hold settings: none, they come from ``hf_overrides``."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TraceConfig:
        """Read the settings file. Raises :class:`~tracefp4.errors.ConfigError` where none is named."""
        settings = active_settings()
        if settings is None:
            raise ConfigError(f"quantization method {METHOD!r} needs the settings file that {VARIABLE} names")
        return cls(settings)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; ``None`` leaves it to vLLM."""
        spec = self.settings.spec
        if isinstance(layer, RoutedExperts):
            quantizes = spec.weights is not None or spec.activations is not None
            return EmulatedMethod(layer.moe_config, spec) if quantizes else PlainMethod(layer.moe_config)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
