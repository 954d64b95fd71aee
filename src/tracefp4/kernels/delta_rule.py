"""One token of the gated delta rule, its state updated in place.

The state of a head is a matrix ``S (key, value)``. A token fades it, corrects what it answers to the key, and reads it
with the query (Yang et al., arXiv 2412.06464, section 3.1)::

    S <- exp(g) S;    delta = beta (v - S^T k);    S <- S + k delta^T;    o = S^T q

All columns of ``S`` are independent, so a program takes one sequence, one head and a tile of columns, holds its piece
of ``S`` in registers and reads and writes it once. What a step moves is the state, twice; ``q``, ``k`` and their norms
are computed again by each program and come from the second-level cache. One warp is a program: sums over the key are
shuffles, no barriers. The state may be float32 or bfloat16; arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import exponential, log1p, narrow, widen

TILE = 16
"""Columns of a program: 128 of them times 16 in float32 are 64 registers of a thread."""


@triton.jit
def _step(
    mixed_ptr, a_ptr, b_ptr, log_rate_ptr, dt_bias_ptr, rows_ptr, state_ptr, out_ptr,
    mixed_stride, a_stride, b_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % (DV // TILE)
    head = tl.program_id(0) // (DV // TILE) % HEADS
    token = (tl.program_id(0) // (DV // TILE * HEADS)).to(tl.int64)
    key, column = tl.arange(0, DK), tile * TILE + tl.arange(0, TILE)
    row = tl.load(rows_ptr + token)
    state = state_ptr + (row * HEADS + head) * (DK * DV) + key[:, None] * DV + column[None, :]
    s = widen(tl.load(state))
    mixed = mixed_ptr + token * mixed_stride
    group = head // (HEADS // KEY_HEADS) * DK
    q = widen(tl.load(mixed + group + key))
    k = widen(tl.load(mixed + KEY_HEADS * DK + group + key))
    v = widen(tl.load(mixed + 2 * KEY_HEADS * DK + head * DV + column))
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (1.0 / DK**0.5)
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    gate = tl.load(b_ptr + token * b_stride + head)
    beta = widen(narrow(1.0 / (1.0 + exponential(-widen(gate))), gate.dtype))
    time = widen(tl.load(a_ptr + token * a_stride + head)) + widen(tl.load(dt_bias_ptr + head))
    # Softplus, linear where PyTorch's is.
    time = tl.where(time > 20.0, time, log1p(exponential(tl.minimum(time, 20.0))))
    s *= exponential(-exponential(widen(tl.load(log_rate_ptr + head))) * time)
    delta = (v - tl.sum(s * k[:, None], axis=0)) * beta
    s += k[:, None] * delta[None, :]
    tl.store(state, narrow(s, state_ptr.dtype.element_ty))
    out = tl.sum(s * q[:, None], axis=0)
    tl.store(out_ptr + (token * HEADS + head) * DV + column, narrow(out, out_ptr.dtype.element_ty))


def takes(state: Tensor) -> bool:
    """Whether the kernel takes states ``(R, H, K, V)``: powers of two, whole tiles."""
    key, value = state.shape[2:]
    return key >= 16 and key & (key - 1) == 0 and value % TILE == 0 and state.is_contiguous()


def step(
    mixed: Tensor, a: Tensor, b: Tensor, log_rate: Tensor, dt_bias: Tensor, state: Tensor, rows: Tensor,
    *, tile: int | None = None, warps: int | None = None,
) -> Tensor:  # fmt: skip
    """One token a sequence; see :func:`tracefp4.models.recurrence.delta_rule` for arguments and result.

    Columns that a program holds (``tile``) and its ``warps`` decide how fast it is, and the order of additions; an H200
    is fastest with 32 columns and two warps but for single sequences, where 16 and one are by a sixth.
    """
    tile = tile or (2 * TILE if state.shape[3] % (2 * TILE) == 0 else TILE)
    warps = warps or tile // TILE
    batch, heads = a.shape
    key, value = state.shape[2:]
    out = torch.empty(batch, heads, value, dtype=mixed.dtype, device=mixed.device)
    if batch:
        _step[(batch * heads * (value // tile),)](
            mixed, a, b, log_rate, dt_bias, rows, state, out, mixed.stride(0), a.stride(0), b.stride(0),
            KEY_HEADS=(mixed.shape[1] - heads * value) // (2 * key), HEADS=heads, DK=key, DV=value, TILE=tile,
            num_warps=warps,
        )  # fmt: skip
    return out
