"""Quantized weights, kept for as long as the weights do not change.

Quantizing a weight costs several passes over it, and one optimizer step runs many forwards: each micro-batch, and each
layer twice under gradient checkpointing. PyTorch counts the in-place changes of a tensor; while that count stands still,
the operand of the last forward is the operand of this one.
"""

from __future__ import annotations

from torch import Tensor, nn

from tracefp4.formats.numerics import Numerics
from tracefp4.models.packing import pack_weight
from tracefp4.models.sites import Operand


class WeightOperands:
    """Operands of the expert projections of one layer.

    Args:
        numerics: weight numerics of the trainer's spec; ``None`` leaves weights in bfloat16.
    """

    def __init__(self, numerics: Numerics | None) -> None:
        self._numerics = numerics
        self._kept: dict[str, tuple[tuple[int, int], Operand]] = {}

    def get(self, module: nn.Module, projection: str) -> Operand:
        """Operand ``(E, out, in)`` of ``module.<projection>``, quantized anew only after the weight changed."""
        weight: Tensor = getattr(module, projection)
        transposed = bool(getattr(module, "is_transposed", False))
        if self._numerics is None:
            plain = weight.detach()
            return Operand(plain.transpose(1, 2).contiguous() if transposed else plain, None)
        stamp = (weight.data_ptr(), weight._version)
        kept = self._kept.get(projection)
        if kept is None or kept[0] != stamp:
            kept = (stamp, pack_weight(weight, self._numerics, transposed=transposed).operand())
            self._kept[projection] = kept
        return kept[1]
