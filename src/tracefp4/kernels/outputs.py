"""What the kernels that round write: only what is asked for, since each tensor is a pass over memory of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.kernels.rules import Rules


@dataclass(slots=True)
class Fused:
    """What a fused quantization wrote; ``None`` where nothing was asked for. Leading axes are those of the input."""

    scales: Tensor
    """uint8 ``(..., D / B)``."""
    global_scale: Tensor | None
    """float32 ``(..., 1)`` made here under scope ``token``, or the one that was given."""
    codes: Tensor | None = None
    """uint8 ``(..., D)``."""
    packed: Tensor | None = None
    """uint8 ``(..., D / 2)``, low nibble first."""
    operand: Tensor | None = None
    """bfloat16 ``(..., D)``: ``code x block scale``."""
    values: Tensor | None = None
    """``(..., D)``: operand times global decode scale, rounded once."""
    planes: Tensor | None = None
    """uint8 ``(..., bits D / 8)``."""
    decode: Tensor | None = None
    """float32 ``(..., 1)``: the global decode scale of each row, whichever form is primary."""


def allocate(
    x: Tensor, lead: torch.Size, width: int, rules: Rules, codes: bool, packed: bool, operand: bool | Tensor,
    values: torch.dtype | None, bits: int,
) -> Fused:  # fmt: skip
    """Tensors for what was asked for; ``lead`` are the leading axes of ``x``.

    Raises:
        FormatError: ``packed``, and elements of more than four bits.
    """
    if packed and rules.eight:
        raise FormatError("only E2M1 codes fit two a byte, these elements have eight bits.")

    def new(size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty((*lead, size), dtype=dtype, device=x.device)

    return Fused(
        scales=new(width // rules.block),
        global_scale=new(1, torch.float32) if rules.scope == "token" else None,
        codes=new(width) if codes else None,
        packed=new(width // 2) if packed else None,
        operand=operand if isinstance(operand, Tensor) else new(width, torch.bfloat16) if operand else None,
        values=None if values is None else new(width, values),
        planes=new(bits * width // 8) if bits else None,
    )


def given_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """``tensor``, or ``other`` in the place of one that a kernel was compiled without."""
    return other if tensor is None else tensor
