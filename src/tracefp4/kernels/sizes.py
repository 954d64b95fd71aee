"""Sizes of launches, in plain Python: Triton's own functions of these names cost the host as much as a small launch."""

from __future__ import annotations

COMPARED_TOGETHER = 8
"""Sites whose checks one launch compares (:mod:`tracefp4.kernels.checks`); whoever has so many waits for no more."""


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below ``n``; 1 for 0."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
