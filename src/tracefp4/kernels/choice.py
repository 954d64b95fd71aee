"""A router's choice from its logits in one pass: softmax, the largest ``K``, gate values, and the record of the routes.

PyTorch takes seven kernels for this, two of them a sort. Here one warp reads the logits of a token once, keeps its
probabilities in registers and takes the largest ``K`` times. Of equal probabilities the lower expert comes first.

Gate values decide how outputs are added up, so the order of additions is part of the result::

    e[i] = exp(logit[i] - largest)                                   float32
    s[l] = e[l] + e[l + 32] + e[l + 64] + ...        l = 0..31       in this order
    sum  = s halved five times: s[:16] + s[16:], then [:8] + [8:], ...
    p[i] = e[i] / sum;   gate[k] = p[chosen[k]], or that over (((p[chosen[0]] + p[chosen[1]]) + ...)

which is how a warp of PyTorch's own softmax adds up to 1024 logits. Experts beyond a multiple of 32 count as ``-inf``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import exponential, narrow, widen


@triton.jit
def _halves(x, N: tl.constexpr):
    """``x[:N / 2] + x[N / 2:]``."""
    low, high = tl.split(tl.permute(tl.reshape(x, (2, N // 2)), (1, 0)))
    return low + high


@triton.jit
def _choose(
    logits_ptr, gates_ptr, chosen_ptr, routes_ptr, slots_ptr, experts, row_stride, slot_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, RENORMALISE: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    row = logits_ptr + token * row_stride
    x = widen(tl.load(row + expert, mask=expert < experts, other=-float("inf")))
    largest = tl.max(x, axis=0)
    lane = tl.arange(0, 32)
    part = tl.zeros((32,), tl.float32)
    for first in tl.static_range(0, EXPERTS, 32):
        piece = tl.load(row + first + lane, mask=first + lane < experts, other=-float("inf"))
        part += exponential(widen(piece) - largest)
    part = _halves(_halves(_halves(_halves(_halves(part, 32), 16), 8), 4), 2)
    p = tl.div_rn(exponential(x - largest), tl.zeros_like(x) + tl.sum(part, axis=0))
    # Positive floats are ordered as their bits are. A NaN comes after every number, what is no expert after that.
    key = tl.where(p == p, p.to(tl.int32, bitcast=True), -1)
    key = tl.where(expert < experts, key, -2)
    slot = tl.arange(0, SLOTS)
    chosen, bits = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.int32)
    total = tl.zeros((SLOTS,), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        at = tl.min(tl.where(key == best, expert, EXPERTS), axis=0)
        chosen, bits = tl.where(slot == k, at, chosen), tl.where(slot == k, best, bits)
        total += tl.full((SLOTS,), best, tl.int32).to(tl.float32, bitcast=True)
        key = tl.where(expert == at, -3, key)
    gate = bits.to(tl.float32, bitcast=True)  # -1 is a NaN
    if RENORMALISE:
        gate = tl.div_rn(gate, total)
    live = slot < TOP_K
    tl.store(gates_ptr + token * TOP_K + slot, narrow(gate, gates_ptr.dtype.element_ty), mask=live)
    tl.store(chosen_ptr + token * TOP_K + slot, chosen.to(tl.int64), mask=live)
    if RECORD:
        to = routes_ptr + tl.load(slots_ptr + token).to(tl.int64) * slot_stride + slot
        tl.store(to, chosen.to(routes_ptr.dtype.element_ty), mask=live)


def choose(
    logits: Tensor,
    top_k: int,
    *,
    renormalise: bool,
    dtype: torch.dtype,
    routes: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the ``top_k`` likeliest experts of each token.

    Args:
        logits: ``(T, E)``, any float dtype; softmax is computed in float32.
        top_k: experts of a token.
        renormalise: whether gate values are divided by their sum.
        dtype: of the gate values.
        routes: ``(slots, top_k)`` integers, last axis dense: where the choice of each token is recorded too.
        slots: int64 ``(T,)``: rows of ``routes``; needed with it.

    Returns:
        gate values ``(T, top_k)`` and experts ``(T, top_k)`` int64, the likeliest first.
    """
    tokens, experts = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    gates = torch.empty(tokens, top_k, dtype=dtype, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        _choose[(tokens,)](
            logits, gates, chosen, chosen if routes is None else routes, chosen if slots is None else slots,
            experts, logits.stride(0), 0 if routes is None else routes.stride(0),
            EXPERTS=max(32, triton.next_power_of_2(experts)), TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k),
            RENORMALISE=renormalise, RECORD=routes is not None, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return gates, chosen
