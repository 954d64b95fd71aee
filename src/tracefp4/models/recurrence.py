"""One token of a gated delta net, on states that stay where they are.

A gated delta net (Yang et al., arXiv 2412.06464) has two states a sequence: the last inputs of a short convolution, and
a matrix for each head that is faded, corrected and read once a token. Transformers passes whole states in and out of a
step. Here a step names the *rows* of a pool that its sequences own and updates them in place, so that each state is
read and written once and nothing else of its size exists.

Both functions compute what ``causal_conv1d_update`` and ``torch_recurrent_gated_delta_rule`` of transformers do, with
their roundings; on a GPU they hand over to kernels that differ from them by the order of additions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.kernels.runtime import usable


def convolve(x: Tensor, state: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal convolution of the newest input of each sequence with SiLU.

    Args:
        x: ``(B, C)``, any float dtype.
        state: ``(R, K, C)`` in the dtype of ``x``: the last ``K`` inputs of each row, oldest first. Rows ``rows`` are
            shifted by one.
        rows: ``(B,)`` int64. A row may be named several times if nobody reads it.
        weight: ``(C, K)`` in the dtype of ``x``.
        bias: ``(C,)`` or ``None``.

    Returns:
        ``(B, C)`` in the dtype of ``x``; the sum is rounded to it before SiLU.
    """
    if usable(state):
        from tracefp4.kernels import convolution

        if state.shape[1] == convolution.TAPS:
            return convolution.convolve(_dense(x), state, rows, weight.contiguous(), bias)
    window = torch.cat([state.index_select(0, rows)[:, 1:], x.unsqueeze(1)], dim=1)
    state.index_copy_(0, rows, window)
    out = (window.float() * weight.float().t()).sum(dim=1)
    return F.silu((out if bias is None else out + bias.float()).to(x.dtype))


def delta_rule(
    mixed: Tensor, a: Tensor, b: Tensor, log_rate: Tensor, dt_bias: Tensor, state: Tensor, rows: Tensor
) -> Tensor:  # fmt: skip
    """The gated delta rule for the newest token of each sequence, in float32.

    With ``q`` and ``k`` divided by their Euclidean norm, ``q`` by ``sqrt(Dk)`` besides, ``g = -exp(log_rate)
    softplus(a + dt_bias)`` and ``beta = sigmoid(b)``: ``S <- exp(g) S``, ``delta = beta (v - S^T k)``, ``S <- S + k
    delta^T``, ``o = S^T q`` (section 3.1 of the paper).

    Args:
        mixed: ``(B, 2 Hk Dk + Hv Dv)``: q, k and v after the convolution. ``Hv / Hk`` value heads in a row share one q
            and k.
        a: ``(B, Hv)``, before softplus.
        b: ``(B, Hv)``, before the sigmoid, which is rounded to its dtype.
        log_rate: ``(Hv,)``, transformers' ``A_log``.
        dt_bias: ``(Hv,)``.
        state: ``(R, Hv, Dk, Dv)`` float32, or bfloat16 to which the new state is rounded. Rows ``rows`` are updated.
        rows: ``(B,)`` int64. A row may be named several times if nobody reads it.

    Returns:
        ``(B, Hv, Dv)`` in the dtype of ``mixed``.
    """
    if usable(state):
        from tracefp4.kernels import delta_rule

        if delta_rule.takes(state):
            return delta_rule.step(_dense(mixed), _dense(a), _dense(b), log_rate, dt_bias, state, rows)
    heads, key, value = state.shape[1:]
    width = (mixed.shape[1] - heads * value) // 2
    q, k, v = mixed.float().split([width, width, heads * value], dim=1)
    q, k = (_unit(x.view(len(x), -1, key)).repeat_interleave(heads * key // width, dim=1) for x in (q, k))
    g = -log_rate.float().exp() * F.softplus(a.float() + dt_bias)
    s = state.index_select(0, rows).float() * g.exp()[..., None, None]
    delta = (v.view(len(v), heads, value) - (s * k.unsqueeze(-1)).sum(dim=2)) * b.sigmoid().float().unsqueeze(-1)
    s = s + k.unsqueeze(-1) * delta.unsqueeze(2)
    state.index_copy_(0, rows, s.to(state.dtype))
    return (s * (q / key**0.5).unsqueeze(-1)).sum(dim=2).to(mixed.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
