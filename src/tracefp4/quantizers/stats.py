"""How often guidance mattered. Every function returns a zero-dimensional tensor and never waits for the device."""

from __future__ import annotations

from torch import Tensor

from tracefp4.formats.blocks import encode
from tracefp4.formats.numerics import Numerics


def flips(z: Tensor, low: Tensor, bits: int, numerics: Numerics) -> Tensor:
    """Which recorded outcomes differ from plain rounding of the trainer's value at the rollout's scale.

    With 4 bits codes are compared as values, so that ``+0`` and ``-0`` are equal; with fewer the kept bits are.

    Args:
        z: float32 ``(..., D)``, normalised by the rollout's scales.
        low: uint8 ``(..., D)``, recorded bits.
        bits: how many, 1 to 4.
        numerics: tie rule and sign of zero.

    Returns:
        bool ``(..., D)``.
    """
    return wrong_codes(encode(z, numerics), low, bits, numerics.element)


def flip_rate(z: Tensor, low: Tensor, bits: int, numerics: Numerics) -> Tensor:
    """Share of :func:`flips`, float32."""
    return flips(z, low, bits, numerics).float().mean()


def wrong_codes(codes: Tensor, recorded: Tensor, bits: int = 4, element: str = "e2m1") -> Tensor:
    """Which codes are not the recorded ones, as far as ``bits`` low bits tell, bool.

    Whole codes (4 bits of E2M1) are compared as values, so that ``+0`` equals ``-0``; otherwise the kept bits are.
    """
    if bits < 4 or element != "e2m1":
        return (codes & ((1 << bits) - 1)) != recorded
    different = codes ^ recorded
    return (different != 0) & ~((different == 8) & (codes & 7 == 0))


def wrong_code_rate(codes: Tensor, recorded: Tensor) -> Tensor:
    """Share of :func:`wrong_codes`, float32."""
    return wrong_codes(codes, recorded).float().mean()


def scale_mismatch(own: Tensor, recorded: Tensor, scale_bits: int = 8) -> Tensor:
    """Share of blocks whose own scale byte differs from the recorded one (in its kept bits), float32.

    Args:
        own: uint8, the trainer's scale bytes under the rollout's global scale.
        recorded: uint8, whole bytes or their low bits.
        scale_bits: how many bits were kept.
    """
    return ((own & ((1 << scale_bits) - 1)) != recorded).float().mean()
