"""Rotary embedding of a trainer's queries and keys, in one launch.

Transformers turns queries and keys in a function of each family's module, ``apply_rotary_pos_emb``, in ten launches,
and autograd turns gradients back in twenty. There is no seam for it, so while a trainer is bound the name in that
module stands for :func:`_fused`, which asks the kernel where gradients are wanted and calls the family's own function
otherwise. The kernel rounds where the eager code rounds: whichever runs, the bits are the same. A family whose function
does anything but turn two halves of a head keeps its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tracefp4.kernels.runtime import usable

FUNCTION = "apply_rotary_pos_emb"
Rotary = Callable[..., tuple[Tensor, Tensor]]


class FusedRotary:
    """Holds the replacement in the module of one family; it ends with the last holder.

    Args:
        attention: an attention module of the family, for which :func:`is_plain` holds.
    """

    _holders: ClassVar[Counter[str]] = Counter()
    _own: ClassVar[dict[str, Rotary]] = {}

    def __init__(self, attention: nn.Module) -> None:
        self._name = type(attention).__module__
        if not self._holders[self._name]:
            self._own[self._name] = getattr(sys.modules[self._name], FUNCTION)
            setattr(sys.modules[self._name], FUNCTION, _fused(self._own[self._name]))
        self._holders[self._name] += 1

    def remove(self) -> None:
        """Put the family's own function back, unless another model still wants the other one."""
        self._holders[self._name] -= 1
        if not self._holders[self._name]:
            setattr(sys.modules[self._name], FUNCTION, self._own.pop(self._name))


def is_plain(attention: nn.Module) -> bool:
    """Whether the family of an attention module turns whole heads by halves, to the last bit."""
    name = type(attention).__module__
    own = FusedRotary._own.get(name) or getattr(sys.modules[name], FUNCTION, None)
    if own is None:
        return False
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    )
    try:
        found = own(q, k, cos, sin)
    except (TypeError, RuntimeError, ValueError, IndexError):
        return False  # it takes other arguments
    expected = (turned(q, cos[:, None], sin[:, None]), turned(k, cos[:, None], sin[:, None]))
    return len(found) == 2 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x (B, H, S, D)`` turned, in as many of its first values as there are angles; written out."""
    part = cos.shape[-1]
    x, rest = x[..., :part], x[..., part:]
    low, high = x.chunk(2, dim=-1)
    out = x * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def _fused(own: Rotary) -> Rotary:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        plain = not args and not kwargs and not torch.compiler.is_compiling()
        if not (plain and torch.is_grad_enabled() and q.requires_grad and _fits(q, k, cos, sin)):
            return own(q, k, cos, sin, *args, **kwargs)
        return _Rotary.apply(q, k, cos, sin)

    return rotate


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if not (usable(q) and all(x.dtype is torch.bfloat16 for x in (q, k, cos, sin))):
        return False
    shapes = cos.shape == sin.shape and cos.stride() == sin.stride() and cos.ndim == 3 and cos.stride(2) == 1
    return shapes and cos.shape[0] in (1, q.shape[0]) and cos.shape[1] == q.shape[2] and cos.shape[2] == q.shape[3]


class _Rotary(torch.autograd.Function):
    """The turn, and the turn back of its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from tracefp4.kernels.rotary import rotate

        ctx.save_for_backward(cos, sin)
        return rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from tracefp4.kernels.rotary import rotate

        return *rotate(grads[0], grads[1], *ctx.saved_tensors, back=True), None, None
