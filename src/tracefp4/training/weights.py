"""The trainer's expert weights, quantized with the numerics that the engine uses for the same weights."""

from __future__ import annotations

from torch import Tensor, nn

from tracefp4.formats.numerics import Numerics
from tracefp4.models.operands import OperandCache
from tracefp4.models.packing import pack_weight
from tracefp4.models.sites import Operand


class WeightOperands:
    """Operands of expert projections under one numerics.

    Args:
        numerics: weight numerics of the trainer's spec; ``None`` leaves weights in bfloat16.
    """

    def __init__(self, numerics: Numerics | None) -> None:
        self.numerics = numerics
        self._cache = OperandCache()

    def get(self, module: nn.Module, projection: str) -> Operand:
        """Operand ``(E, out, in)`` of ``module.<projection>``, quantized anew only after the weight changed."""
        weight: Tensor = getattr(module, projection)
        return self._cache.get(weight, lambda: self._make(module, weight.detach()))

    def _make(self, module: nn.Module, weight: Tensor) -> Operand:
        transposed = bool(getattr(module, "is_transposed", False))
        if self.numerics is None:
            return Operand(weight.transpose(1, 2).contiguous() if transposed else weight, None)
        return pack_weight(weight, self.numerics, transposed=transposed).operand()
