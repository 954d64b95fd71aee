"""Keys and queries in another basis (:mod:`tracefp4.models.key_basis`) in one launch, and back for gradients.

A program takes some vectors, one head of one token each, subtracts the head's centre, flips signs, and turns: log2 of
the width times it replaces pairs by their sums and differences. Results lie as projections write them, tokens before
heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import narrow, widen
from tracefp4.kernels.sizes import cdiv

_VALUES = 4096
"""Values of a program."""


@triton.jit
def _stage(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Sums and differences of values ``STEP`` apart, ``(ROWS, WIDTH)``."""
    pairs = tl.permute(tl.reshape(x, (ROWS * WIDTH // (2 * STEP), 2, STEP)), (0, 2, 1))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, WIDTH))


@triton.jit
def _turn(
    x_ptr, centre_ptr, signs_ptr, out_ptr, count, heads, tokens, batch_stride, head_stride, token_stride, scale,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, CENTRE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, mask = tl.arange(0, WIDTH)[None, :], (row < count)[:, None]
    head, token = row % heads, row // heads
    start = (token // tokens).to(tl.int64) * batch_stride + (token % tokens).to(tl.int64) * token_stride
    start += head.to(tl.int64) * head_stride
    x = widen(tl.load(x_ptr + start[:, None] + column, mask=mask, other=0.0))
    if CENTRE:
        x -= tl.load(centre_ptr + head[:, None] * WIDTH + column, mask=mask, other=0.0)
    if STAGES > 0:
        signs = tl.load(signs_ptr + column)
        x = x * scale if BACK else x * signs
        for stage in tl.static_range(STAGES):
            x = _stage(x, ROWS, WIDTH, 1 << (STAGES - 1 - stage if BACK else stage))
        x = x * signs if BACK else x * scale
    tl.store(out_ptr + row[:, None].to(tl.int64) * WIDTH + column, narrow(x, out_ptr.dtype.element_ty), mask=mask)


def turn(x: Tensor, centre: Tensor | None, signs: Tensor | None, scale: float, *, back: bool = False) -> Tensor:
    """Vectors less a centre, in a turned basis: computed in float32, rounded once.

    Args:
        x: ``(B, H, S, D)`` in any float dtype, ``D`` a power of two; fewer than ``2^31`` vectors.
        centre: ``(H, 1, D)`` float32, contiguous; ``None``: 0.
        signs: ``(D,)`` float32 of 1 and -1; ``None``: no turn.
        scale: what sums and differences are multiplied with, once.
        back: the transposed turn, of gradients.

    Returns:
        The shape and dtype of ``x``; a view of ``(B, S, H, D)``.
    """
    batch, heads, tokens, width = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    out = torch.empty(batch, tokens, heads, width, dtype=x.dtype, device=x.device)
    rows, count = max(1, _VALUES // width), batch * heads * tokens
    if count:
        _turn[(cdiv(count, rows),)](
            x, x if centre is None else centre, x if signs is None else signs, out, count, heads, tokens,
            x.stride(0), x.stride(1), x.stride(2), scale,
            ROWS=rows, WIDTH=width, STAGES=0 if signs is None else width.bit_length() - 1, CENTRE=centre is not None,
            BACK=back, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out.transpose(1, 2)
