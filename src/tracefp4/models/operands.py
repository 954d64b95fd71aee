"""Weight operands, kept for as long as the weight does not change.

Making an operand costs several passes over a weight, and a weight is used by many forwards before it changes: decode
steps up to the next sync, micro-batches up to the next optimizer step, each layer twice under gradient checkpointing.
PyTorch counts the in-place changes of a tensor; while that count stands still, the last operand is still the right one.

On a CPU operands are kept in float32. There every product widens its operands anyway, and widening the experts of a
model costs more than multiplying with them; the values are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracefp4.models.sites import Operand


class OperandCache:
    """Operands by weight tensor."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[int, int], Operand]] = {}

    def get(self, weight: Tensor, make: Callable[[], Operand]) -> Operand:
        """The operand of ``weight``, made anew only after the weight changed in place."""
        stamp = (weight.data_ptr(), weight._version)
        kept = self._kept.get(id(weight))
        if kept is None or kept[0] != stamp:
            kept = (stamp, widened(make()))
            self._kept[id(weight)] = kept
        return kept[1]


def widened(operand: Operand) -> Operand:
    """The operand as products on its device want it: in float32 on a CPU."""
    if operand.values.device.type == "cpu" and operand.values.dtype is torch.bfloat16:
        return Operand(operand.values.float(), operand.scale, operand.packed)
    return operand
