"""The interface of a quantizer: a tensor and its numerics in, codes and scales out."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tracefp4.formats.blocks import Quantized
from tracefp4.formats.numerics import Numerics


class Quantizer(Protocol):
    """Chooses codes and scales for ``x (..., D)``."""

    def __call__(self, x: Tensor, numerics: Numerics, global_scale: Tensor | None = None) -> Quantized:
        """Quantize ``x``, under ``global_scale`` (primary form) if one is given."""
        ...
