"""One linear layer over all experts, with quantized operands.

Every pair (token, expert slot) has one output row, the product of the token's row with its expert's weight. Four steps,
the same on both sides and on every device::

    1. acc = values_x . values_w        exact bfloat16 operands (code x block scale), float32 accumulation
    2. acc = acc * (scale_x * scale_w)  the FP32 global scales, which never enter an operand
    3. acc = acc + bias                 float32
    4. round once to the model's dtype

This is what an FP4 tensor core computes, up to the order and width of its accumulation. The experts of a group, formed
by :mod:`tracefp4.models.dispatch`, are multiplied in one batched product over rows padded with zeros.

The backward pass is straight-through: a quantized operand is a constant copy of the tensor it stands for, so the
gradient reaches ``x`` and ``weight`` as if they had been multiplied themselves, with the other factor dequantized.
An operand that comes with its codes is kept as codes until then, and widened again unless it is still around.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import ModelError
from tracefp4.models.dispatch import Dispatch, Group
from tracefp4.models.kept import Kept, tensors_of
from tracefp4.models.sites import Operand


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
        plan: from :func:`tracefp4.models.dispatch.dispatch`.
        per_token: whether ``x`` has one row a token, used by all its slots, or one row a pair.
        transposed: layout of ``weight``.

    Returns:
        ``(P, N)`` in the dtype of ``x``, in the order of ``plan``.

    Raises:
        ModelError: operands whose shapes do not fit.
    """
    _check(x, weight, x_op, w_op, plan, per_token, transposed)
    return _ExpertLinear.apply(x, weight, bias, x_op, w_op, plan, per_token, transposed)


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
    dtype: torch.dtype, x_op: Operand, w_op: Operand, bias: Tensor | None, plan: Dispatch, per_token: bool
) -> Tensor:
    scale = _pair_scale(x_op.scale, w_op.scale, plan, per_token)
    values, weight = x_op.whole(), w_op.values.transpose(1, 2)
    out = torch.empty(plan.pairs.numel(), weight.shape[2], dtype=dtype, device=weight.device)
    for group in plan.groups:
        if plan.dense and per_token:
            batch = values.expand(group.size, -1, -1)
        else:
            batch = _padded(_rows(values, plan, group, per_token), plan, group)
        acc = _picked(_group_product(batch, weight, group), plan, group)
        if scale is not None:
            acc *= scale[group.rows]
        if bias is not None:
            acc += bias[plan.experts[group.rows]].to(acc.dtype)
        out[group.rows] = acc
    return out


def _pair_scale(x_scale: Tensor | None, w_scale: Tensor | None, plan: Dispatch, per_token: bool) -> Tensor | None:
    """Return ``scale_x * scale_w`` for each pair, ``(P, 1)`` float32."""
    row = None if x_scale is None else x_scale[plan.tokens] if per_token else x_scale
    col = None if w_scale is None else w_scale[plan.experts].unsqueeze(-1)
    if row is None or col is None:
        return col if row is None else row
    return row * col


def _rows(x: Tensor, plan: Dispatch, group: Group, per_token: bool) -> Tensor:
    """One row for each pair of the group."""
    return x[plan.tokens[group.rows]] if per_token else x[group.rows]


def _padded(rows: Tensor, plan: Dispatch, group: Group) -> Tensor:
    """Return ``(experts, capacity, D)`` with the group's rows in place and zeros elsewhere."""
    if group.size == 1:
        return rows.unsqueeze(0)
    batch = rows.new_zeros(group.size * group.capacity, rows.shape[1])
    return batch.index_copy_(0, plan.place[group.rows], rows).view(group.size, group.capacity, -1)


def _picked(batch: Tensor, plan: Dispatch, group: Group) -> Tensor:
    """The inverse of :func:`_padded`."""
    if group.size == 1:
        return batch[0]
    return batch.flatten(0, 1)[plan.place[group.rows]]


def _group_product(batch: Tensor, weight: Tensor, group: Group) -> Tensor:
    """``(experts, capacity, D) @ (E, D, N)[group]``."""
    if group.size == 1:
        return product(batch[0], weight[group.first]).unsqueeze(0)
    return product(batch, weight[group.first : group.first + group.size])


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
    """The layer with its straight-through gradient. Keeps the operands, never a widened copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_op: Operand,
        w_op: Operand,
        plan: Dispatch,
        per_token: bool,
        transposed: bool,
    ) -> Tensor:
        """The product of the operands; ``x`` and ``weight`` only receive gradients."""
        ctx.kept = Kept.of(x_op), Kept.of(w_op)
        ctx.save_for_backward(*tensors_of(x_op), *tensors_of(w_op))
        ctx.plan, ctx.per_token, ctx.transposed = plan, per_token, transposed
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return _forward(x.dtype, x_op, w_op, bias, plan, per_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias, from the operands that were kept."""
        (x_kept, w_kept), saved = ctx.kept, ctx.saved_tensors
        plan, (x_dtype, w_dtype, b_dtype) = ctx.plan, ctx.dtypes
        grad = grad.contiguous()
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_input(grad, w_kept.operand(*saved[3:]), plan, ctx.per_token).to(x_dtype)
        if ctx.needs_input_grad[1]:
            experts, out, width = w_kept.shape
            shape = (experts, width, out) if ctx.transposed else (experts, out, width)
            grad_w = torch.zeros(shape, dtype=w_dtype, device=grad.device)
            _grad_weight(grad, x_kept.values(*saved[:3]), plan, ctx.per_token, ctx.transposed, grad_w)
        if ctx.needs_input_grad[2]:
            wide = torch.promote_types(grad.dtype, torch.float32)
            grad_b = torch.zeros(plan.num_experts, grad.shape[1], dtype=wide, device=grad.device)
            for group in plan.groups:
                part = _padded(grad[group.rows], plan, group)
                grad_b[group.first : group.first + group.size] = part.sum(1, dtype=wide)
            grad_b = grad_b.to(b_dtype)
        return grad_x, grad_w, grad_b, None, None, None, None, None


def _grad_input(grad: Tensor, w_op: Operand, plan: Dispatch, per_token: bool) -> Tensor:
    """``grad @ (values_w * scale_w)``, float32; the scale is a constant of the expert and is applied to the product.

    With ``per_token``, a token's row was used by K pairs: their gradients are added in slot order.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    rows = torch.empty(grad.shape[0], w_op.values.shape[2], dtype=wide, device=grad.device)
    for group in plan.groups:
        batch = _padded(grad[group.rows], plan, group)
        acc = _picked(_group_product(batch, w_op.values, group), plan, group)
        rows[group.rows] = acc if w_op.scale is None else acc * w_op.scale[plan.experts[group.rows]].unsqueeze(-1)
    if not per_token:
        return rows
    slots = torch.empty_like(rows)
    slots[plan.pairs] = rows
    slots = slots.view(plan.num_tokens, plan.top_k, rows.shape[1])
    total = slots[:, 0].clone()
    for slot in range(1, plan.top_k):
        total += slots[:, slot]
    return total


def _grad_weight(grad: Tensor, x: Tensor, plan: Dispatch, per_token: bool, transposed: bool, out: Tensor) -> None:
    """Write ``grad^T @ x`` into ``out``, for each expert that was hit, in the parameter's layout."""
    for group in plan.groups:
        left = _padded(grad[group.rows], plan, group)
        right = _padded(_rows(x, plan, group, per_token), plan, group)
        if transposed:
            left, right = right, left
        out[group.first : group.first + group.size] = product(left.transpose(1, 2), right)
