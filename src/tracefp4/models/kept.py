"""What a backward pass keeps of an operand.

A product's gradient needs its other factor once more. An operand that comes with its codes is kept as those, 4.5 bits a
value instead of 16, and widened again to the same bits; if somebody still holds the widened values, as a cache of
weights does, they are used.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.formats.numerics import Numerics
from tracefp4.formats.packed import Packed
from tracefp4.kernels.runtime import usable
from tracefp4.models.sites import Operand


def tensors_of(operand: Operand) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What a backward pass keeps of an operand: values or codes, block scales of codes, global scale."""
    if operand.packed is None:
        return operand.values, None, operand.scale
    return operand.packed.codes, operand.packed.scales, operand.scale


@dataclass(frozen=True, slots=True)
class Kept:
    """How an operand is made again of its tensors."""

    shape: torch.Size
    dtype: torch.dtype
    numerics: Numerics | None
    """Of codes; ``None`` if the values themselves are kept."""
    alive: weakref.ref[Tensor] | None
    """The values, for as long as somebody else holds them."""

    @classmethod
    def of(cls, operand: Operand) -> Kept:
        """What is needed beside :func:`tensors_of`."""
        values, packed = operand.values, operand.packed
        if packed is None:
            return cls(values.shape, values.dtype, None, None)
        return cls(values.shape, values.dtype, packed.numerics, weakref.ref(values))

    def operand(self, data: Tensor, scales: Tensor | None, scale: Tensor | None) -> Operand:
        """The operand, to the same bits."""
        if self.numerics is None or scales is None:
            return Operand(data, scale)
        values = self.alive() if self.alive is not None else None
        return Operand(Packed(data, scales, self.numerics).operand(self.dtype) if values is None else values, scale)

    def values(self, data: Tensor, scales: Tensor | None, scale: Tensor | None) -> Tensor:
        """An activation as its gradient's other factor: times its global scale, rounded once."""
        if self.numerics is not None and scales is not None:
            return Packed(data, scales, self.numerics).values(scale, self.dtype)
        if scale is None:
            return data
        if usable(data) and data.is_contiguous() and scale.is_contiguous():
            from tracefp4.kernels.row_scale import scale_rows

            return scale_rows(data, scale)
        # The product is float32, as its factor is; it is rounded where it is written, without a second pass.
        return torch.mul(data, scale, out=torch.empty_like(data))
