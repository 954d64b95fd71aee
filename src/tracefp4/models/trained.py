"""Routed experts of a trainer, by the grouped kernels of :mod:`tracefp4.kernels.experts_training`.

The same four steps as :mod:`tracefp4.models.linear`, in the same precision: exact operands, float32 sums, global scales
applied to the sum, one rounding. The pairs stand in the order token, slot, so a site's ``middle`` sees its rows in the
order in which guidance is recorded. Gradients differ from the plain path in two roundings: a pair's share of the
gradient of ``x`` is rounded to the model's dtype before the slots are added, and sums run in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tracefp4.kernels.runtime import usable
from tracefp4.models.kept import Kept, tensors_of
from tracefp4.models.sites import Operand


def takes(module: Any, x: Tensor) -> bool:
    """Whether the kernels compute this layer: bfloat16 on a GPU, no biases."""
    return x.dtype is torch.bfloat16 and module.gate_up_proj.dtype is x.dtype and usable(x) and not module.has_bias


def forward(module: Any, site: Any, x: Tensor, index: Tensor, gates: Tensor, *, silu: bool) -> Tensor:
    """As :func:`tracefp4.models.experts.experts_forward`, with gradients; ``silu``: the gate is ``silu(gate) * up``."""
    from tracefp4.kernels.experts_training import ROWS
    from tracefp4.kernels.routing import Route, route_layers

    def sort(experts: Tensor) -> list[tuple[Route, Tensor]]:
        return route_layers(experts, module.num_experts, ROWS)

    in_order = hasattr(site, "sorted")
    where = site.sorted(index, sort) if in_order else sort(index.unsqueeze(0))[0]
    transposed = bool(getattr(module, "is_transposed", False))
    up, x_op = site.gate_up(module), site.enter(x)
    gate_up = _Linear.apply(x, module.gate_up_proj, x_op, up, where, True, transposed, False)
    # A trainer's site takes rows in order without being told.
    order = torch.arange(index.numel(), device=x.device) if not in_order else None
    h = gate_up if silu else module._apply_gate(gate_up)
    h_op = _gated(site, gate_up, order) if silu else site.middle(h, order)
    out = _Linear.apply(h, module.down_proj, h_op, site.down(module), where, False, transposed, silu)
    return _Combine.apply(out, gates)


def _gated(site: Any, gate_up: Tensor, order: Tensor | None) -> Operand:
    """``site.middle`` of ``silu(gate) * up``, in one pass where the site has one."""
    from tracefp4.kernels.gate import gate

    find = getattr(site, "gated", None) if order is None else None
    operand = None if find is None else find(gate_up)
    return site.middle(gate(gate_up.detach()), order) if operand is None else operand


class _Linear(torch.autograd.Function):
    """One projection with its straight-through gradient.

    With ``gated`` the operand stands for ``silu(gate) * up``, and ``x`` holds both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        x_op: Operand,
        w_op: Operand,
        where: Any,
        per_token: bool,
        transposed: bool,
        gated: bool,
    ) -> Tensor:
        """The product of the operands; ``x`` and ``weight`` only receive gradients."""
        from tracefp4.kernels.experts_training import pair_product

        ctx.kept = Kept.of(x_op), Kept.of(w_op)
        ctx.save_for_backward(*tensors_of(x_op), *tensors_of(w_op), x if gated else None)
        ctx.where, ctx.per_token, ctx.transposed = where, per_token, transposed
        ctx.tokens, ctx.dtype = x.shape[0], weight.dtype
        return pair_product(x_op.values, x_op.scale, w_op.values, w_op.scale, where[0], per_token=per_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input and weight; through the gate as well if ``gated``."""
        from tracefp4.kernels.experts_training import pair_product, slot_sum, weight_product
        from tracefp4.kernels.gate import gate_backward

        (x_kept, w_kept), (*saved, gate_up), (pairs, starts) = ctx.kept, ctx.saved_tensors, ctx.where
        grad = grads[0].contiguous()
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            w = w_kept.operand(*saved[3:])
            grad_x = pair_product(grad, None, w.values.transpose(1, 2), w.scale, pairs, per_token=False)
            grad_x = slot_sum(grad_x, ctx.tokens) if ctx.per_token else grad_x
            grad_x = grad_x if gate_up is None else gate_backward(grad_x, gate_up)
        if ctx.needs_input_grad[1]:
            experts, out, width = w_kept.shape
            shape = (experts, width, out) if ctx.transposed else (experts, out, width)
            grad_w = torch.empty(shape, dtype=ctx.dtype, device=grad.device)
            target = grad_w.transpose(1, 2) if ctx.transposed else grad_w
            weight_product(grad, x_kept.values(*saved[:3]), pairs, starts, target, per_token=ctx.per_token)
        return grad_x, grad_w, None, None, None, None, None, None


class _Combine(torch.autograd.Function):
    """Weighted sum of a token's expert outputs, in slot order."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gates: Tensor) -> Tensor:
        """``(T, H)`` from the rows of all pairs ``(T K, H)`` and the gate values ``(T, K)``."""
        from tracefp4.kernels.experts import weighted_sum

        ctx.save_for_backward(out, gates)
        return weighted_sum(out, gates)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the rows and of the gate values."""
        from tracefp4.kernels.experts_training import combine_backward

        out, gates = ctx.saved_tensors
        grad_out, grad_gates = combine_backward(grads[0], out, gates)
        return grad_out, grad_gates
