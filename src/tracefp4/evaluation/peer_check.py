"""Whether another library computes what we believe that it computes.

A library that is timed is given packed weights that we know, codes and scales, and its result is compared once with the
same sums in float64. Every code times its scale is exact there, and nothing is rounded between the products. A library
rounds to bfloat16 three times or four (the first product, the gate, the second), so it is off by some 0.3 % in the
root of the mean square. Weights in an order that it does not expect, another gate, or rows of other tokens make its
result off by 100 % and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.formats import e2m1

TOLERANCE = 0.01
"""Relative deviation, by root mean square, beyond which a result is called one that deviates."""
WORST = 1e6
"""What stands for a deviation that is no number."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute the pair of products, and what its rows are."""

    name: str
    work: Callable[[], object]
    """Returns ``(rows, hidden)``."""
    tokens: Tensor
    """int64 ``(rows,)``."""
    experts: Tensor
    """int64 ``(rows,)``."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Stacked FP4 weights as checkpoints have them."""

    codes: Tensor
    """uint8 ``(E, out, inner / 2)``, two codes a byte, the first one in the low half."""
    scales: Tensor
    """uint8 ``(E, out, inner / block)``: E4M3 bytes, or E8M0 bytes if there is no ``factor``."""
    factor: Tensor | None
    """float32 ``(E,)``, the global scales."""

    @classmethod
    def random(cls, experts: int, out: int, inner: int, device: torch.device, *, mx: bool) -> Packed:
        """Weights with a deviation of some hundredths, MXFP4 or NVFP4."""
        size = (experts, out, inner // (32 if mx else 16))
        codes = torch.empty(experts, out, inner // 2, dtype=torch.uint8, device=device).random_(0, 256)
        scales = torch.empty(size, dtype=torch.uint8, device=device)
        if mx:
            return cls(codes, scales.random_(118, 124), None)
        # E4M3 from 16 to 240, as a global scale leaves them that was made for the largest magnitude.
        return cls(codes, scales.random_(88, 120), 7e-5 * (0.5 + torch.rand(experts, device=device)))

    def values(self, expert: int) -> Tensor:
        """One matrix, float64 ``(out, inner)``."""
        codes = e2m1.decode(e2m1.unpack(self.codes[expert]), torch.float32).double()
        if self.factor is None:
            scales = torch.exp2(self.scales[expert].double() - 127)
        else:
            scales = self.scales[expert].view(torch.float8_e4m3fn).double() * self.factor[expert].double()
        return codes * scales.repeat_interleave(codes.shape[-1] // scales.shape[-1], -1)


def pair_in_float64(
    x: Tensor, way: Way, weights: tuple[Packed, Packed], gate: Callable[[Tensor], Tensor]
) -> Tensor:  # fmt: skip
    """Both products of the rows of a way, without a rounding.

    Args:
        x: bfloat16 ``(B, hidden)``.
        way: says which token and which expert a row has.
        weights: of the first product ``(2 inter, hidden)`` and of the second ``(hidden, inter)``.
        gate: float64 ``(n, 2 inter)`` to ``(n, inter)``.

    Returns:
        float64 ``(rows, hidden)``.
    """
    first, second = weights
    out = torch.empty(len(way.tokens), x.shape[1], dtype=torch.float64, device=x.device)
    for expert in way.experts.unique().tolist():
        rows = (way.experts == expert).nonzero().flatten()
        up = x[way.tokens[rows]].double() @ first.values(expert).T
        out[rows] = gate(up) @ second.values(expert).T
    return out


def deviation(found: object, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; :data:`WORST` for another shape or no number."""
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return WORST
    value = float((found.double() - expected).norm() / expected.norm())
    return value if value < WORST else WORST


def silu_gate(up: Tensor) -> Tensor:
    """``silu(gate) * up`` of halves."""
    gate, linear = up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * linear


def clamped_swiglu(up: Tensor, alpha: float, limit: float) -> Tensor:
    """The gate of gpt-oss, of neighbouring columns: ``g sigmoid(alpha g) (l + 1)``, both clamped."""
    gate, linear = up[..., ::2].clamp(max=limit), up[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + 1)
