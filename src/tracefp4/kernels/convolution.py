"""One token of a short causal convolution, its window updated in place.

A gated delta net convolves each channel with the last four inputs. One token needs three old ones: a program takes a
tile of channels of one sequence, reads them from the row that the sequence owns, adds up four products and writes the
window back, shifted by one. Windows lie *taps first* ``(row, 4, channels)``: each tap of a tile is one run of memory,
and each thread reads and writes channels of its own, so nothing has to wait for others.

Sum and SiLU are rounded to the model's dtype, one after the other, as in the eager code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import narrow, widen
from tracefp4.kernels.gate import silu
from tracefp4.kernels.sizes import cdiv

TAPS = 4
"""Inputs that the convolution looks at."""
_TILE = 256


@triton.jit
def _convolve(
    x_ptr, rows_ptr, state_ptr, weight_ptr, bias_ptr, out_ptr, channels, x_stride,
    BIAS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = channel < channels
    # Window i of the state is input t - 4 + i of the last token, t - 3 + i of this one: the oldest is not needed again.
    state = state_ptr + tl.load(rows_ptr + token) * 4 * channels + channel
    first = tl.load(state + channels, mask=mask, other=0.0)
    second = tl.load(state + 2 * channels, mask=mask, other=0.0)
    third = tl.load(state + 3 * channels, mask=mask, other=0.0)
    new = tl.load(x_ptr + token * x_stride + channel, mask=mask, other=0.0)
    weights = tl.load(weight_ptr + channel[:, None] * 4 + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(widen(weights), (TILE, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    total = widen(first) * w0 + widen(second) * w1 + widen(third) * w2 + widen(new) * w3
    if BIAS:
        total += widen(tl.load(bias_ptr + channel, mask=mask, other=0.0))
    tl.store(state, first, mask=mask)
    tl.store(state + channels, second, mask=mask)
    tl.store(state + 2 * channels, third, mask=mask)
    tl.store(state + 3 * channels, new, mask=mask)
    tl.store(out_ptr + token * channels + channel, silu(narrow(total, x_ptr.dtype.element_ty)), mask=mask)


def convolve(x: Tensor, state: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``silu(convolution)`` of one token a sequence.

    Args:
        x: ``(B, C)`` bfloat16, float16 or float32, last axis dense.
        state: ``(R, 4, C)`` in the dtype of ``x``, contiguous; the last four inputs of each row, oldest first. Rows
            ``rows`` are updated.
        rows: ``(B,)`` int64; a row that is named several times is left with some of its channels by each.
        weight: ``(C, 4)``, contiguous.
        bias: ``(C,)`` or ``None``.

    Returns:
        ``(B, C)`` in the dtype of ``x``.
    """
    batch, channels = x.shape
    out = torch.empty(batch, channels, dtype=x.dtype, device=x.device)
    if batch:
        _convolve[(batch, cdiv(channels, _TILE))](
            x, rows, state, weight, weight if bias is None else bias, out, channels, x.stride(0),
            BIAS=bias is not None, TILE=_TILE, num_warps=1,
        )  # fmt: skip
    return out
