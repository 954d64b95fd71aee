"""Residual compensation: a second quantized term for what the first one missed.

QUADS (arXiv 2607.15810) lowers the activation error of an FP4 rollout instead of teaching the trainer to live with it.
The residual ``R = X - Q(X)`` is itself quantized to FP4, on the half of the channels where it is largest, and its
product is added, both times with FP4 operands::

    Y = Q(X) W + Q(R_S) W_S          S: the channels with the largest residual

Both terms share the weight, and here also the global scale of ``X`` (block scales of ``R`` are about a twelfth of those
of ``X``, well within E4M3's range). So ``Q(X) + Q(R_S)`` can be handed on as one operand: with six significant bits
each, their sum is exact in float32 up to a ratio of 2^18 of the two block scales, and the product differs from that of
two FP4 products only in the order of accumulation. It is not exact in bfloat16, but both terms are: a kernel takes them
one after the other and multiplies them with a weight that it reads once (:mod:`tracefp4.kernels.experts`).

Which channels: the paper ranks channels by residual and does not say over which tokens. Here each token has its own
``S``. That keeps a token's result independent of its batch, and it is the most favourable reading: no common set of
channels covers a token's largest residuals better than its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.blocks import Quantized
from tracefp4.quantizers.nearest import quantize_nearest


def terms(x: Tensor, q: Quantized, share: float) -> tuple[Tensor, Tensor]:
    """The operands of ``Q(X)`` and ``Q(R_S)``, both in units of the global scale of ``q``.

    Args:
        x: ``(rows, D)``, what was quantized.
        q: its quantization.
        share: share of each row's channels that get a second term, in (0, 1].

    Returns:
        Two bfloat16 tensors ``(rows, D)``, exact.

    Raises:
        FormatError: a share outside of (0, 1].
    """
    count = channels(share, x.shape[-1])
    residual = x.float() - q.dequantize(torch.float32)
    if count < x.shape[-1]:
        # Stable, because residuals of MX formats are often level: of equal ones the first channel counts everywhere.
        chosen = residual.abs().sort(dim=-1, descending=True, stable=True).indices[..., :count]
        residual = torch.zeros_like(residual).scatter(-1, chosen, residual.gather(-1, chosen))
    return q.operand(), quantize_nearest(residual, q.numerics, q.global_scale).operand()


def compensated(x: Tensor, q: Quantized, share: float) -> Tensor:
    """The sum of both :func:`terms`, float32 ``(rows, D)``; multiply by ``q.decode_scale()`` for values.

    Raises:
        FormatError: as for :func:`terms`.
    """
    first, second = terms(x, q, share)
    return first.float() + second.float()


def channels(share: float, width: int) -> int:
    """Channels of a row of ``width`` that get a second term, at least one.

    Raises:
        FormatError: a share outside of (0, 1].
    """
    if not 0 < share <= 1:
        raise FormatError(f"residual compensation covers a share of the channels in (0, 1], got {share}")
    return max(1, round(share * width))
