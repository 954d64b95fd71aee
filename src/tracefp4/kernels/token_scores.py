"""Log-probability of one token a row and the entropy of the row, in one pass over the logits, and the gradient in one.

Eager code makes a float32 copy of the logits, their log-softmax, its exponential and a product with it, and as many
passes for the gradient: some 40 bytes a logit, where reading it takes two and writing its gradient two more. With
logits ``l``, temperature ``t``, ``x = l / t`` and ``lse = log sum exp(x)``,

    logprob = x[target] - lse        entropy = lse - sum p x,  p = exp(x - lse)        dl = (1[target] - p) d / t

A program takes a row, keeps maximum, sum and weighted sum of each of its lanes, and puts them together at the end; sums
run in float32 in an order of their own, so results equal the eager code's up to that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.elements import narrow, widen

_WIDTH = 2048
"""Logits that a program looks at at once."""
_WARPS = 8


@triton.jit
def _scaled(logits_ptr, at, mask, temperature):
    """Logits over the temperature, float32; minus infinity outside."""
    x = widen(tl.load(logits_ptr + at, mask=mask, other=float("-inf")))
    if temperature != 1.0:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
    return x


@triton.jit
def _scores(
    logits_ptr, target_ptr, logprob_ptr, entropy_ptr, lse_ptr, vocabulary, temperature, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    top = tl.full((WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    weighted = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, vocabulary, WIDTH):
        mask = first + lane < vocabulary
        x = _scaled(logits_ptr, row * vocabulary + first + lane, mask, temperature)
        higher = tl.maximum(top, x)
        # Nothing but minus infinity so far: the difference would be a NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, share = tl.exp(top - base), tl.exp(x - base)
        total = total * shrink + share
        weighted = weighted * shrink + tl.where(mask, share * x, 0.0)
        top = higher
    highest = tl.max(top, axis=0)
    shrink = tl.exp(top - highest)
    whole = tl.sum(total * shrink, axis=0)
    lse = highest + tl.log(whole)
    target = tl.load(target_ptr + row)
    x = widen(tl.load(logits_ptr + row * vocabulary + target))
    if temperature != 1.0:
        x = tl.div_rn(x, temperature)
    tl.store(logprob_ptr + row, x - lse)
    tl.store(entropy_ptr + row, lse - tl.sum(weighted * shrink, axis=0) / whole)
    tl.store(lse_ptr + row, lse)


@triton.jit
def _scores_backward(
    grad_ptr, logits_ptr, target_ptr, lse_ptr, out_ptr, vocabulary, temperature, WIDTH: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * WIDTH + tl.arange(0, WIDTH)
    mask = token < vocabulary
    at = row * vocabulary + token
    grad, lse, target = tl.load(grad_ptr + row), tl.load(lse_ptr + row), tl.load(target_ptr + row)
    share = tl.exp(_scaled(logits_ptr, at, mask, temperature) - lse)
    value = tl.where(token == target, grad - share * grad, -share * grad)
    if temperature != 1.0:
        value = tl.div_rn(value, temperature + tl.zeros_like(value))
    tl.store(out_ptr + at, narrow(value, out_ptr.dtype.element_ty), mask=mask)


def token_scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of one token a row.

    Args:
        logits: ``(T, V)``, bfloat16 or float32, contiguous.
        targets: ``(T,)`` int64 in ``0..V-1``.
        temperature: positive.

    Returns:
        Log-probabilities, entropies, and ``lse`` for :func:`token_scores_backward`, each ``(T,)`` float32.
    """
    rows, vocabulary = logits.shape
    logprob, entropy, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    if rows:
        _scores[(rows,)](
            logits, targets, logprob, entropy, lse, vocabulary, float(temperature), WIDTH=_WIDTH, num_warps=_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return logprob, entropy, lse


def token_scores_backward(grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, temperature: float) -> Tensor:
    """Gradient of the logits, in their shape and dtype, from that of the log-probabilities ``(T,)`` float32."""
    out = torch.empty_like(logits)
    rows, vocabulary = logits.shape
    if rows:
        _scores_backward[(rows, triton.cdiv(vocabulary, 2 * _WIDTH))](
            grad, logits, targets, lse, out, vocabulary, float(temperature), WIDTH=2 * _WIDTH, num_warps=_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
