"""Rotary position embedding of queries and keys in one launch, with the roundings of the eager code.

A head's two halves are the coordinates of planes that are turned by the token's angles: ``(a, b)`` becomes
``(a cos - b sin, b cos + a sin)``, every product and the sum rounded to the model's dtype as the eager code rounds
them, so results are equal bit for bit. The gradient is turned back the same way. Results are laid out token by token,
as the projections' are: what follows then needs no copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import narrow, negated, widen
from tracefp4.kernels.sizes import next_power_of_2


@triton.jit
def _turn(
    x_ptr, out_ptr, start, to, x_head, x_last, heads, cos_low, cos_high, sin_low, sin_high,
    HEADS: tl.constexpr, HALF: tl.constexpr, REAL: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)
    lane = tl.arange(0, HALF)
    mask = (head < heads)[:, None] & (lane < REAL)[None, :]
    at = start + head[:, None].to(tl.int64) * x_head
    low = tl.load(x_ptr + at + lane[None, :] * x_last, mask=mask, other=0.0)
    high = tl.load(x_ptr + at + (REAL + lane)[None, :] * x_last, mask=mask, other=0.0)
    kind = low.dtype
    a, b = widen(low), widen(high)
    if BACK:
        # The half that was turned into the other one takes that one's sine, and loses or gains its sign.
        low_part, high_part = widen(narrow(b * sin_high, kind)), negated(widen(narrow(a * sin_low, kind)))
    else:
        low_part, high_part = widen(narrow(negated(b) * sin_low, kind)), widen(narrow(a * sin_high, kind))
    first = narrow(widen(narrow(a * cos_low, kind)) + low_part, kind)
    second = narrow(widen(narrow(b * cos_high, kind)) + high_part, kind)
    place = out_ptr + to + head[:, None] * (2 * REAL) + lane[None, :]
    tl.store(place, first, mask=mask)
    tl.store(place + REAL, second, mask=mask)


@triton.jit
def _rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    length, q_batch, q_head, q_row, q_last, k_batch, k_head, k_row, k_last, turn_batch, turn_row, q_heads, k_heads,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REAL: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // length, token % length
    lane = tl.arange(0, HALF)
    at = batch * turn_batch + row * turn_row + lane
    inside = lane < REAL
    cos_low = widen(tl.load(cos_ptr + at, mask=inside, other=0.0))[None, :]
    cos_high = widen(tl.load(cos_ptr + at + REAL, mask=inside, other=0.0))[None, :]
    sin_low = widen(tl.load(sin_ptr + at, mask=inside, other=0.0))[None, :]
    sin_high = widen(tl.load(sin_ptr + at + REAL, mask=inside, other=0.0))[None, :]
    _turn(
        q_ptr, q_out_ptr, batch * q_batch + row * q_row, token * q_heads * 2 * REAL, q_head, q_last, q_heads,
        cos_low, cos_high, sin_low, sin_high, Q_HEADS, HALF, REAL, BACK,
    )  # fmt: skip
    _turn(
        k_ptr, k_out_ptr, batch * k_batch + row * k_row, token * k_heads * 2 * REAL, k_head, k_last, k_heads,
        cos_low, cos_high, sin_low, sin_high, K_HEADS, HALF, REAL, BACK,
    )  # fmt: skip


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by the angles of their tokens.

    Args:
        q: ``(B, Hq, S, D)``, any strides; with ``back`` the gradient of a result.
        k: ``(B, Hk, S, D)`` likewise.
        cos: ``(B or 1, S, D)`` in the dtype of ``q``, last axis contiguous.
        sin: likewise, with the same strides.
        back: turn gradients back.

    Returns:
        Both turned, in the shapes of ``q`` and ``k``; memory is in the order ``B, S, H, D``.
    """
    batch, q_heads, length, width = q.shape
    k_heads = k.shape[1]
    q_out, k_out = (
        torch.empty(batch, length, heads, width, dtype=q.dtype, device=q.device) for heads in (q_heads, k_heads)
    )
    if batch * length:
        _rotate[(batch * length,)](
            q, k, cos, sin, q_out, k_out,
            length, *q.stride(), *k.stride(), cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), q_heads, k_heads,
            Q_HEADS=next_power_of_2(q_heads), K_HEADS=next_power_of_2(k_heads),
            HALF=next_power_of_2(width // 2), REAL=width // 2, BACK=back, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
