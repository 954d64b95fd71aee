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

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError

ATTRIBUTE = "tracefp4_key_basis"
"""Attribute of an attention module that has one."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyBasis:
    """A shift and a turn of the keys of one layer, float32."""

    centre: Tensor | None
    """``(Hkv, 1, D)``, subtracted; ``None``: nothing."""
    turn: Tensor | None
    """``(D, D)`` orthonormal; ``None``: identity."""

    def keys(self, k: Tensor) -> Tensor:
        """Keys ``(B, Hkv, S, D)`` in this basis, computed in float32 and rounded to their dtype."""
        y = k.float()
        y = y if self.centre is None else y - self.centre
        return (y if self.turn is None else y @ self.turn).to(k.dtype)

    def queries(self, q: Tensor) -> Tensor:
        """Queries ``(B, Hq, S, D)`` in this basis, likewise."""
        return q if self.turn is None else (q.float() @ self.turn).to(q.dtype)


def basis_of(module: nn.Module) -> KeyBasis | None:
    """The basis of an attention module; ``None`` if it stores keys as they are."""
    return getattr(module, ATTRIBUTE, None)


def set_basis(module: nn.Module, basis: KeyBasis) -> None:
    """Store the keys of an attention module in a basis from now on."""
    object.__setattr__(module, ATTRIBUTE, basis)


def hadamard(width: int, seed: int = 0) -> Tensor:
    """Orthonormal ``(width, width)`` float32: a Hadamard matrix whose rows have random signs.

    Raises:
        ConfigError: ``width`` is not a power of two.
    """
    if width & (width - 1):
        raise ConfigError(f"keys of {width} channels cannot be rotated: their number is not a power of two")
    h = torch.ones(1, 1)
    while len(h) < width:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = 2.0 * torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(seed)) - 1.0
    return signs * h / math.sqrt(width)
