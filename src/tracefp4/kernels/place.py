"""Where a quantizer's kernel records outcomes, besides what it returns.

An engine keeps a token's outcomes in a row that belongs to the token's slot. Its quantizer knows them first, so it
writes them there itself: nothing is put together in between, and nothing is launched but the quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes of one site in the rows of ``T`` tokens.

    A vector has ``[ bit planes | block scales | global scale: 4, under scope token | ticket: 4 ]``, and those of a
    token follow each other. Vectors that are quantized are in order of tokens.
    """

    rows: Tensor
    """uint8 ``(slots, n)``, last axis dense."""
    start: int
    """Where the site begins in a row."""
    size: int
    """Bytes of a vector."""
    vectors: int
    """Vectors of a token."""
    slots: Tensor
    """int64 ``(T,)``: row of each token."""
    tickets: Tensor
    """int32 ``(T,)``: left beside each vector."""
