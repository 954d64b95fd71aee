"""E4M3 (``float8_e4m3fn``): the block scale of NVFP4 and the element of MXFP8.

One sign bit, four exponent bits (bias 7), three mantissa bits. No infinities; ``0x7F`` and ``0xFF`` are NaN, the
largest finite value is 448 (``0x7E``), the smallest normal ``2^-6``, the smallest subnormal ``2^-9`` (``0x01``).
Block scales are never negative, so their bytes are ``0..126``, in the order of their values: neighbouring scales have
neighbouring bytes.

Source: OCP 8-bit floating point specification (OFP8) 1.0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tracefp4.formats.tables import lookup, on_device

MAX = 448.0
"""Largest finite value, byte 126."""

NAN = 127
"""The positive NaN byte."""

_MANY = 4096
"""On a CPU PyTorch converts E4M3 one value at a time; from here on a table is faster, six times in the limit."""


def encode(values: Tensor) -> Tensor:
    """Round to nearest, ties to even, saturating at 448.

    Every NaN becomes ``0x7F``: devices disagree about the sign of one that they compute.

    Args:
        values: float32, any shape.

    Returns:
        uint8 bytes, same shape.
    """
    data = values.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return data.masked_fill_(data == 255, NAN)


def decode(data: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of bytes, exact in float32, bfloat16 and float16.

    Args:
        data: uint8, any shape.
        dtype: result type.
    """
    if data.is_cpu and data.numel() >= _MANY:
        return lookup(on_device(value_table, data.device, dtype), data.to(torch.int32))
    return data.view(torch.float8_e4m3fn).to(dtype)


def value_table(dtype: torch.dtype) -> Tensor:
    """The values of all bytes in ``dtype``, ``(256,)``."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)


def byte(value: float) -> int:
    """Byte of a non-negative constant that the format holds exactly."""
    mantissa, exponent = math.frexp(value)  # value = mantissa 2^exponent, 1/2 <= mantissa < 1
    if value < 2.0**-6:
        return int(value * 512)
    return ((exponent + 6) << 3) + int(16 * mantissa - 8)
