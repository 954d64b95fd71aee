"""Gate values of routes that are given: softmax over all experts, picked at the routes, and the gradient of that.

Under replay the experts of a token are known before its router has run, and only their gate values are wanted, of the
live logits ``l``: with ``p = softmax(l)``, in float32,

    w_k = p[e_k]    or, renormalised,    w_k = p[e_k] / S,   S = sum over slots of p[e_k]

The gradient ``d`` of ``w`` goes back through the quotient, ``g_k = (d_k - sum_j d_j w_j) / S``, and through the
softmax, ``dl = p (g - sum g p)``, where ``g`` is 0 at experts that were not chosen. PyTorch takes six launches there
and ten back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import narrow, widen
from tracefp4.kernels.sizes import cdiv, next_power_of_2

_VALUES = 1024
"""Logits of a program, more if a row has more."""


@triton.jit
def _softmax(logits_ptr, row, live, expert, experts):
    """Probabilities ``(ROWS, EXPERTS)`` float32."""
    inside = live[:, None] & (expert < experts)[None, :]
    logits = widen(tl.load(logits_ptr + row[:, None] * experts + expert[None, :], mask=inside, other=0.0))
    logits = tl.where((expert < experts)[None, :], logits, -float("inf"))
    power = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return tl.div_rn(power, tl.broadcast_to(tl.sum(power, axis=1)[:, None], power.shape))


@triton.jit
def _chosen(index_ptr, row, live, expert, slot: tl.constexpr, TOP_K: tl.constexpr):
    """Where each row's chosen expert of a slot stands among all: bool ``(ROWS, EXPERTS)``."""
    index = tl.load(index_ptr + row * TOP_K + slot, mask=live, other=0).to(tl.int32)
    return expert[None, :] == index[:, None]


@triton.jit
def _gate_values(
    logits_ptr, index_ptr, out_ptr, tokens, experts,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, RENORMALISED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < tokens
    expert = tl.arange(0, EXPERTS)
    p = _softmax(logits_ptr, row, live, expert, experts)
    total = tl.full((ROWS,), 1.0, tl.float32)
    if RENORMALISED:
        total = tl.zeros((ROWS,), tl.float32)
        for slot in tl.static_range(TOP_K):
            total += tl.sum(tl.where(_chosen(index_ptr, row, live, expert, slot, TOP_K), p, 0.0), axis=1)
    for slot in tl.static_range(TOP_K):
        value = tl.sum(tl.where(_chosen(index_ptr, row, live, expert, slot, TOP_K), p, 0.0), axis=1)
        if RENORMALISED:
            value = tl.div_rn(value, total)
        tl.store(out_ptr + row * TOP_K + slot, narrow(value, out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _gate_values_backward(
    grad_ptr, logits_ptr, index_ptr, out_ptr, tokens, experts,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, RENORMALISED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < tokens
    expert = tl.arange(0, EXPERTS)
    p = _softmax(logits_ptr, row, live, expert, experts)
    total, inner = tl.full((ROWS,), 1.0, tl.float32), tl.zeros((ROWS,), tl.float32)
    if RENORMALISED:
        total = tl.zeros((ROWS,), tl.float32)
        for slot in tl.static_range(TOP_K):
            grad = widen(tl.load(grad_ptr + row * TOP_K + slot, mask=live, other=0.0))
            value = tl.sum(tl.where(_chosen(index_ptr, row, live, expert, slot, TOP_K), p, 0.0), axis=1)
            total += value
            inner += grad * value
        inner = inner / total
    g = tl.zeros((ROWS, EXPERTS), tl.float32)
    for slot in tl.static_range(TOP_K):
        grad = (widen(tl.load(grad_ptr + row * TOP_K + slot, mask=live, other=0.0)) - inner) / total
        g += tl.where(_chosen(index_ptr, row, live, expert, slot, TOP_K), grad[:, None], 0.0)
    value = p * (g - tl.sum(g * p, axis=1)[:, None])
    inside = live[:, None] & (expert < experts)[None, :]
    at = out_ptr + row[:, None] * experts + expert[None, :]
    tl.store(at, narrow(value, out_ptr.dtype.element_ty), mask=inside)


def gate_values(logits: Tensor, index: Tensor, *, renormalised: bool, dtype: torch.dtype) -> Tensor:
    """Gate values ``(T, K)`` in ``dtype`` of ``logits (T, E)`` at experts ``index (T, K)``; both contiguous."""
    out = torch.empty(index.shape, dtype=dtype, device=logits.device)
    if index.numel():
        _launch(_gate_values, (logits, index, out), index, logits, renormalised)
    return out


def gate_values_backward(grad: Tensor, logits: Tensor, index: Tensor, *, renormalised: bool) -> Tensor:
    """Gradient of ``logits (T, E)`` in their dtype, of the gradient ``(T, K)`` of :func:`gate_values`; contiguous."""
    out = torch.empty_like(logits)
    if index.numel():
        _launch(_gate_values_backward, (grad, logits, index, out), index, logits, renormalised)
    return out


def _launch(
    kernel: triton.JITFunction, tensors: tuple[Tensor, ...], index: Tensor, logits: Tensor, renormalised: bool
) -> None:
    (tokens, top_k), experts = index.shape, logits.shape[1]
    size = next_power_of_2(experts)
    rows = max(1, _VALUES // size)
    kernel[(cdiv(tokens, rows),)](
        *tensors, tokens, experts,
        TOP_K=top_k, ROWS=rows, EXPERTS=size, RENORMALISED=renormalised, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
