"""Congruent scales: a block scale in two or three bits.

Trainer and rollout compute the same block scale from slightly different values, so their bytes are equal or
neighbours. Scale bytes are ordered like their values, so it is enough to send the byte modulo 4 or 8: the trainer
computes its own byte, under the *rollout's* global scale, and takes the nearest byte with the recorded residue. That
is the rollout's byte whenever the two differ by less than half the period. When they differ by more the result is
wrong without a sign of it, which is why a checksum of the whole bytes travels along (:mod:`tracefp4.guidance`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.errors import FormatError

LARGEST_E4M3 = 126
"""Largest E4M3 scale byte, 448."""

LARGEST_E8M0 = 254
"""Largest E8M0 scale byte, 2^127."""


def restore_scales(own: Tensor, low: Tensor, bits: int, largest: int = LARGEST_E4M3) -> Tensor:
    """The byte in ``0..largest`` nearest to ``own`` whose low bits are ``low``; ties go to the smaller byte.

    Args:
        own: uint8, the trainer's own scale bytes under the rollout's global scale.
        low: uint8, recorded low bits, same shape.
        bits: how many, 2 or 3.
        largest: 126 for E4M3, 254 for E8M0.

    Raises:
        FormatError: other bits, or a tensor is not uint8.
    """
    _check(own, bits)
    _check(low, bits)
    period = 1 << bits
    center = own.to(torch.int16).clamp_(max=largest)
    # Of the residues -period/2 .. period/2 - 1 exactly one fits; the lower bound belongs to the range: ties go down.
    step = (low.to(torch.int16) - center + period // 2) % period - period // 2
    byte = center + step
    byte = torch.where(byte < 0, byte + period, torch.where(byte > largest, byte - period, byte))
    return byte.to(torch.uint8)


def _check(data: Tensor, bits: int) -> None:
    if bits not in (2, 3):
        raise FormatError(f"Congruent scales have 2 or 3 bits, got {bits}; whole scales (8 bits) need no restoring.")
    if data.dtype != torch.uint8:
        raise FormatError(f"Scale bytes are uint8, got {data.dtype}.")
