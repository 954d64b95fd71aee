"""One linear layer over all experts, with quantized operands.

Every pair (token, expert slot) has one output row, the product of the token's row with its expert's weight. Four steps,
the same on both sides and on every device::

    1. acc = values_x . values_w        exact bfloat16 operands (code x block scale), float32 accumulation
    2. acc = acc * (scale_x * scale_w)  the FP32 global scales, which never enter an operand
    3. acc = acc + bias                 float32
    4. round once to the model's dtype

This is what an FP4 tensor core computes, up to the order and width of its accumulation. Two strategies lead to the same
sums:

``loop``    pairs sorted by expert, one matrix product for each expert that was hit. The number of rows of each expert
            has to be known on the host: one synchronisation. For training and prefill.
``dense``   every token with every expert in one batched product, of which each pair picks its row. ``E`` times the work
            of one expert over all tokens, but no synchronisation, so a decode step can be captured in a CUDA graph. No
            gradients.

The backward pass is straight-through: a quantized operand is a constant copy of the tensor it stands for, so the
gradient reaches ``x`` and ``weight`` as if they had been multiplied themselves, with the other factor dequantized.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from tracefp4.errors import ModelError
from tracefp4.models.sites import Operand

Strategy = Literal["auto", "loop", "dense"]

DENSE_ROWS = 4096
"""``auto`` takes ``dense`` up to this many rows of the batched product (experts x tokens)."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Which expert computes which rows.

    ``P = T * K`` pairs: row ``i`` of a pair tensor belongs to slot ``pairs[i] % K`` of token ``pairs[i] // K`` and is
    computed by expert ``experts[i]``. With ``bounds`` the pairs are sorted by expert and rows ``bounds[e]`` to
    ``bounds[e + 1]`` belong to expert ``e``; without, they stand in the order token, slot.
    """

    experts: Tensor
    """``(P,)`` int64."""
    pairs: Tensor
    """``(P,)`` int64, ``token * K + slot``."""
    tokens: Tensor
    """``(P,)`` int64, ``pairs // K``."""
    num_tokens: int
    top_k: int
    num_experts: int
    bounds: tuple[int, ...] | None


def choose_strategy(num_tokens: int, num_experts: int, device: torch.device, training: bool) -> Strategy:
    """Return ``dense`` for a small batch on CUDA that needs no gradient, and whenever a CUDA graph is being captured.

    Args:
        num_tokens: tokens of the batch.
        num_experts: experts of the layer.
        device: where the operands lie.
        training: whether gradients may be asked for, now or when a checkpointed layer is run again.
    """
    if device.type != "cuda" or training:
        return "loop"
    if torch.cuda.is_current_stream_capturing() or num_tokens * num_experts <= DENSE_ROWS:
        return "dense"
    return "loop"


def dispatch(top_k_index: Tensor, num_experts: int, strategy: Strategy) -> Dispatch:
    """Order the pairs of a batch.

    Args:
        top_k_index: ``(T, K)`` integer expert ids; with ``dense`` the ids of one token must differ, as top-k's do.
        num_experts: experts of the layer.
        strategy: ``loop`` sorts by expert (tokens keep their order) and synchronises once; ``dense`` does neither.

    Raises:
        ModelError: an unknown strategy, or (``loop``) expert ids out of range.
    """
    if strategy not in ("loop", "dense"):
        raise ModelError(f"unknown expert strategy {strategy!r}; valid are 'auto', 'loop' and 'dense'")
    num_tokens, top_k = top_k_index.shape
    experts = top_k_index.reshape(-1).long()
    if strategy == "dense":
        pairs, bounds = torch.arange(experts.numel(), device=experts.device), None
    else:
        experts, pairs = torch.sort(experts, stable=True)
        edges = torch.arange(num_experts + 1, device=experts.device)
        bounds = tuple(torch.searchsorted(experts, edges).tolist())
        if bounds[0] != 0 or bounds[-1] != experts.numel():
            raise ModelError(f"expert ids must lie in 0..{num_experts - 1}")
    return Dispatch(experts, pairs, pairs // top_k, num_tokens, top_k, num_experts, bounds)


def expert_linear(
    x: Tensor,
    weight: Tensor,
    x_op: Operand,
    w_op: Operand,
    bias: Tensor | None,
    plan: Dispatch,
    *,
    per_token: bool,
    transposed: bool = False,
) -> Tensor:
    """Multiply every pair's row with its expert's weight.

    Args:
        x: the tensor that ``x_op`` stands for, for its gradient and dtype: ``(T, D)`` if ``per_token``, else ``(P, D)``
            in the order of ``plan``.
        weight: the parameter that ``w_op`` stands for, for its gradient: ``(E, N, D)``, or ``(E, D, N)`` if
            ``transposed``.
        x_op: quantized rows of ``x``; ``scale (rows, 1)`` float32 or ``None``.
        w_op: quantized weights ``(E, N, D)``; ``scale (E,)`` float32 or ``None``.
        bias: ``(E, N)`` or ``None``.
        plan: from :func:`dispatch`.
        per_token: whether ``x`` has one row a token, used by all its slots, or one row a pair.
        transposed: layout of ``weight``.

    Returns:
        ``(P, N)`` in the dtype of ``x``, in the order of ``plan``.

    Raises:
        ModelError: operands whose shapes do not fit, or gradients asked of a ``dense`` plan.
    """
    _check(x, weight, x_op, w_op, plan, per_token, transposed)
    inputs = (x, weight, bias)
    if plan.bounds is None:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            raise ModelError("the dense expert strategy has no gradient; use 'loop' for training")
        return _forward(x.dtype, x_op, w_op, bias, plan, per_token)
    operands = (x_op.values, x_op.scale, w_op.values, w_op.scale)
    return _ExpertLinear.apply(*inputs, *operands, plan, per_token, transposed)


def _check(
    x: Tensor, weight: Tensor, x_op: Operand, w_op: Operand, plan: Dispatch, per_token: bool, transposed: bool
) -> None:
    experts, out_features, width = w_op.values.shape
    expected = (experts, width, out_features) if transposed else (experts, out_features, width)
    if experts != plan.num_experts or tuple(weight.shape) != expected:
        raise ModelError(f"weight operand {tuple(w_op.values.shape)} does not fit the parameter {tuple(weight.shape)}")
    rows = plan.num_tokens if per_token else plan.pairs.numel()
    if x_op.values.shape != x.shape or tuple(x.shape) != (rows, width):
        raise ModelError(
            f"activation operand {tuple(x_op.values.shape)} for input {tuple(x.shape)}; expected {(rows, width)}"
        )


def _forward(
    dtype: torch.dtype, x_op: Operand, w_op: Operand, bias: Tensor | None, plan: Dispatch, gather: bool
) -> Tensor:
    scale = _pair_scale(x_op.scale, w_op.scale, plan, gather)
    if plan.bounds is None:
        return _epilogue(_dense_product(x_op.values, w_op.values, plan, gather), scale, bias, plan.experts).to(dtype)
    rows = x_op.values[plan.tokens] if gather else x_op.values
    out = torch.empty(rows.shape[0], w_op.values.shape[1], dtype=dtype, device=rows.device)
    for expert, part in _hits(plan):
        acc = product(rows[part], w_op.values[expert].t())
        one = None if bias is None else bias[expert]
        out[part] = _epilogue(acc, None if scale is None else scale[part], one, None)
    return out


def _hits(plan: Dispatch) -> list[tuple[int, slice]]:
    bounds = plan.bounds or ()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(pairwise(bounds)) if b > a]


def _pair_scale(x_scale: Tensor | None, w_scale: Tensor | None, plan: Dispatch, gather: bool) -> Tensor | None:
    """Return ``scale_x * scale_w`` for each pair, ``(P, 1)`` float32."""
    row = None if x_scale is None else x_scale[plan.tokens] if gather else x_scale
    col = None if w_scale is None else w_scale[plan.experts].unsqueeze(-1)
    if row is None or col is None:
        return col if row is None else row
    return row * col


def _epilogue(acc: Tensor, scale: Tensor | None, bias: Tensor | None, experts: Tensor | None) -> Tensor:
    if scale is not None:
        acc = acc * scale
    if bias is not None:
        acc = acc + (bias if experts is None else bias[experts]).to(acc.dtype)
    return acc


def _dense_product(x: Tensor, w: Tensor, plan: Dispatch, gather: bool) -> Tensor:
    if gather:
        batch = x.expand(plan.num_experts, -1, -1)
    else:
        batch = x.new_zeros(plan.num_experts, plan.num_tokens, x.shape[-1])
        batch[plan.experts, plan.tokens] = x
    return product(batch, w.transpose(1, 2))[plan.experts, plan.tokens]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product of 2-D or 3-D operands, accumulated and returned in float32 (float64 operands: float64).

    On CUDA bfloat16 operands go to the tensor cores as they are; elsewhere they are widened, which is exact. An operand
    that is float32 already is taken as it is: on the CPU, where widening the weights costs more than a decode step's
    product, a site can keep them so.
    """
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    narrow = a.dtype is b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    if narrow and a.device.type == "cuda" and _wide_output(a.device, a.dtype):
        return multiply(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return multiply(a.to(wide), b.to(wide))


@functools.cache
def _wide_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build can write a float32 product of narrow operands."""
    probe = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.mm(probe, probe, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


class _ExpertLinear(torch.autograd.Function):
    """The ``loop`` strategy with its straight-through gradient. Keeps the operands, never a widened copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_values: Tensor,
        x_scale: Tensor | None,
        w_values: Tensor,
        w_scale: Tensor | None,
        plan: Dispatch,
        gather: bool,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_values, x_scale, w_values, w_scale)
        ctx.plan, ctx.gather, ctx.transposed = plan, gather, transposed
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return _forward(x.dtype, Operand(x_values, x_scale), Operand(w_values, w_scale), bias, plan, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_values, x_scale, w_values, w_scale = ctx.saved_tensors
        plan, (x_dtype, w_dtype, b_dtype) = ctx.plan, ctx.dtypes
        x_op, w_op = Operand(x_values, x_scale), Operand(w_values, w_scale)
        grad = grad.contiguous()
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_input(grad, w_op, plan, ctx.gather).to(x_dtype)
        if ctx.needs_input_grad[1]:
            grad_w = _grad_weight(grad, x_op, w_values, plan, ctx.gather, ctx.transposed, w_dtype)
        if ctx.needs_input_grad[2]:
            wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
            grad_b = torch.zeros(plan.num_experts, grad.shape[1], dtype=wide, device=grad.device)
            for expert, part in _hits(plan):
                grad_b[expert] = grad[part].sum(0, dtype=wide)
            grad_b = grad_b.to(b_dtype)
        return grad_x, grad_w, grad_b, None, None, None, None, None, None, None


def _grad_input(grad: Tensor, w_op: Operand, plan: Dispatch, gather: bool) -> Tensor:
    """``grad @ (values_w * scale_w)``, float32; the scale is a constant of the expert and is applied to the product.

    With ``gather``, a token's row was used by K pairs: their gradients are added in slot order.
    """
    grad = grad.to(w_op.values.dtype)
    wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
    rows = torch.empty(grad.shape[0], w_op.values.shape[2], dtype=wide, device=grad.device)
    for expert, part in _hits(plan):
        acc = product(grad[part], w_op.values[expert])
        rows[part] = acc if w_op.scale is None else acc * w_op.scale[expert]
    if not gather:
        return rows
    slots = torch.empty_like(rows)
    slots[plan.pairs] = rows
    slots = slots.view(plan.num_tokens, plan.top_k, rows.shape[1])
    total = slots[:, 0].clone()
    for slot in range(1, plan.top_k):
        total += slots[:, slot]
    return total


def _grad_weight(
    grad: Tensor, x_op: Operand, w_values: Tensor, plan: Dispatch, gather: bool, transposed: bool, dtype: torch.dtype
) -> Tensor:
    """``grad^T @ (values_x * scale_x)`` for each expert, in the layout of the parameter; zero for experts not hit."""
    x = x_op.values if x_op.scale is None else (x_op.values * x_op.scale).to(x_op.values.dtype)
    rows = x[plan.tokens] if gather else x
    grad = grad.to(rows.dtype)
    shape = (w_values.shape[0], w_values.shape[2], w_values.shape[1]) if transposed else w_values.shape
    out = torch.zeros(shape, dtype=dtype, device=grad.device)
    for expert, part in _hits(plan):
        left, right = (rows[part], grad[part]) if transposed else (grad[part], rows[part])
        out[expert] = product(left.t(), right)
    return out
