"""FP4 tensors as they are kept: two codes a byte and a scale byte a block, 4.5 bits a value in NVFP4.

What is multiplied is bfloat16, what has to be remembered need not be. Widening is one pass on a GPU. On a CPU a byte is
looked up as a pair of values, and the pairs are multiplied by their block's scale; both products are exact, so neither
way changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats import e2m1
from tracefp4.formats.blocks import Quantized, decode_scales, quantize
from tracefp4.formats.fused import has_kernel, quantize_by_kernel, rules
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.tables import on_device
from tracefp4.kernels.runtime import usable


@dataclass(frozen=True, slots=True)
class Packed:
    """Codes and block scales of a tensor ``(..., D)`` of E2M1 elements; its global scale is kept elsewhere."""

    codes: Tensor
    """uint8 ``(..., D / 2)``, low nibble first."""
    scales: Tensor
    """uint8 ``(..., D / B)``."""
    numerics: Numerics

    @classmethod
    def of(cls, q: Quantized) -> Packed:
        """Pack codes.

        Raises:
            FormatError: elements of more than four bits.
        """
        if q.numerics.element != "e2m1":
            raise FormatError(f"only E2M1 codes fit two a byte, numerics {q.numerics.name!r} has {q.numerics.element}.")
        return cls(e2m1.pack(q.codes), q.scales, q.numerics)

    def operand(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """``code x block scale`` ``(..., D)``, exact in bfloat16 and in float32."""
        return self._values(None, dtype)

    def values(self, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``code x block scale x factor`` ``(..., D)``, computed in fp32 and rounded once.

        Args:
            factor: float32 global decode scale, ``(..., 1)`` or one number; ``None`` stands for 1.
            dtype: of the result.
        """
        return self._values(factor, dtype)

    def _values(self, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        if usable(self.codes):
            from tracefp4.kernels.dequantize import dequantize

            factor = None if factor is None else factor.contiguous()
            return dequantize(self.codes.contiguous(), self.scales.contiguous(), rules(self.numerics), dtype, factor)
        exact = dtype if factor is None else torch.float32
        pairs = on_device(pair_table, self.codes.device, exact).index_select(0, self.codes.reshape(-1).int())
        values = pairs.view(*self.scales.shape, self.numerics.block)
        values = values.mul_(decode_scales(self.scales, self.numerics, exact).unsqueeze(-1)).flatten(-2)
        return values if factor is None else values.mul_(factor).to(dtype)


def quantize_packed(x: Tensor, numerics: Numerics, *, per: int = 0) -> tuple[Packed, Tensor | None]:
    """Round to nearest as :func:`tracefp4.formats.blocks.quantize` does, and pack; a kernel never writes whole codes.

    Args:
        x: ``(..., D)`` bfloat16, float16 or float32.
        numerics: every arithmetic choice.
        per: for scope ``tensor``, how many leading axes have a global scale each.

    Returns:
        Codes and block scales, and the global scale in primary form.

    Raises:
        FormatError: elements of more than four bits, wrong dtype, or ``D`` is no multiple of the block size.
    """
    if has_kernel(x, numerics):
        codes, scales, global_scale = quantize_by_kernel(x.detach(), numerics, per=per, packed=True)
        return Packed(codes, scales, numerics), global_scale
    q = quantize(x, numerics, per=per)
    return Packed.of(q), q.global_scale


def pair_table(dtype: torch.dtype) -> Tensor:
    """Both values of every byte of packed codes, ``(256, 2)``."""
    return e2m1.decode(e2m1.unpack(torch.arange(256, dtype=torch.uint8)[:, None]), dtype)
