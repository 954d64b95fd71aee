"""The basis in which keys are stored.

Attention sees a key only in products with queries, and a softmax sees only differences of these. So all keys of a head
may be shifted by one vector, and keys and queries turned alike, without a change to the result::

    softmax((k - c) R . q R) = softmax(k . q - c . q) = softmax(k . q)       R orthonormal; c . q is one for all keys

What does change is what FP4 makes of a key. Some channels of keys after the rotary embedding are large and nearly the
same for all tokens: a block of 16 with one of them has a scale that rounds the others away. Less their mean, and
turned so that what sticks out is spread over the whole head, keys lose much less (``benchmarks/kv_error.py``). The turn
is a Hadamard matrix with random signs, as QuaRot has it (arXiv 2404.00456); the shift is a mean over tokens, as
SageAttention has it (arXiv 2410.02367), but a constant, so that what is stored does not depend on what follows.

A basis hangs on its attention module and is part of what :func:`tracefp4.models.attention.attention_forward` computes,
on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError
from tracefp4.kernels.runtime import usable

ATTRIBUTE = "tracefp4_key_basis"
"""Attribute of an attention module that has one."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyBasis:
    """A shift and a turn of the keys of one layer, float32."""

    centre: Tensor | None
    """``(Hkv, 1, D)``, subtracted; ``None``: nothing."""
    signs: Tensor | None
    """``(D,)`` of 1 and -1: turned as :func:`turned` does; ``None``: not turned."""

    def keys(self, k: Tensor) -> Tensor:
        """Keys ``(B, Hkv, S, D)`` in this basis, computed in float32 and rounded to their dtype."""
        return _in_basis(k, self.centre, self.signs)

    def queries(self, q: Tensor) -> Tensor:
        """Queries ``(B, Hq, S, D)`` in this basis, likewise."""
        return q if self.signs is None else _in_basis(q, None, self.signs)


def basis_of(module: nn.Module) -> KeyBasis | None:
    """The basis of an attention module; ``None`` if it stores keys as they are."""
    return getattr(module, ATTRIBUTE, None)


def set_basis(module: nn.Module, basis: KeyBasis) -> None:
    """Store the keys of an attention module in a basis from now on."""
    object.__setattr__(module, ATTRIBUTE, basis)


def random_signs(width: int, seed: int = 0) -> Tensor:
    """``(width,)`` float32 of 1 and -1, for heads of ``width`` channels.

    Raises:
        ConfigError: ``width`` is not a power of two.
    """
    if width & (width - 1):
        raise ConfigError(f"keys of {width} channels cannot be rotated: their number is not a power of two")
    return 2.0 * torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(seed)) - 1.0


def turned(x: Tensor, signs: Tensor) -> Tensor:
    """``x (..., D)`` float32 times ``diag(signs) H / sqrt(D)``, with ``H`` the Hadamard matrix of Sylvester.

    In ``log2 D`` stages of sums and differences: of neighbours, of neighbouring pairs, and so on.
    """
    width, step = x.shape[-1], 1
    y = x * signs
    while step < width:
        a, b = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y, step = torch.stack((a + b, a - b), -2).flatten(-3), 2 * step
    return y * _scale(width)


def _scale(width: int) -> float:
    return 1 / math.sqrt(width)


def _in_basis(x: Tensor, centre: Tensor | None, signs: Tensor | None) -> Tensor:
    width = x.shape[-1]
    if not torch.compiler.is_compiling() and usable(x) and not width & (width - 1):
        return _Turn.apply(x, centre, signs)
    y = x.float() if centre is None else x.float() - centre
    return (y if signs is None else turned(y, signs)).to(x.dtype)


class _Turn(torch.autograd.Function):
    """One launch each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, centre: Tensor | None, signs: Tensor | None) -> Tensor:
        """Vectors ``(B, H, S, D)`` in the basis."""
        from tracefp4.kernels.turn import turn

        ctx.signs = signs
        return turn(x, centre, signs, _scale(x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Gradients in the basis of ``x``."""
        from tracefp4.kernels.turn import turn

        signs = ctx.signs
        return grads[0] if signs is None else turn(grads[0], None, signs, _scale(len(signs)), back=True), None, None
