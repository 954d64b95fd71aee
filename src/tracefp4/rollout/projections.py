"""Products of one input as one matrix product: Q, K and V, or what a gated delta net projects.

In a decode step of few tokens a product takes the time of reading its weight, and K and V of a model with grouped heads
have small ones: each of the three launches costs more than its bytes. A gated delta net has two of one column a head.
So the weights are laid side by side, and the parameters become views of the whole: names, shapes and values stay, and a
sync that copies into them fills the whole.

A layer that is being compiled multiplies once. The first projection that is called makes the whole product, the others
take their columns of it; the compiler follows this while it traces, and nothing of it is left at run time. An
uncompiled layer, prefill for one, multiplies one by one as before.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Projections of one input, by the names that transformers gives them, in the order in which they are called."""


class Joined:
    """The product of one input with several weights, while a compiler traces a layer.

    Args:
        weight: ``(sum of outputs, inputs)``.
        bias: ``(sum of outputs,)`` or ``None``.
        sizes: outputs of each part.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...]) -> None:
        self.weight, self.bias, self.sizes = weight, bias, sizes
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def part(self, x: Tensor, index: int) -> Tensor:
        """Columns of part ``index`` of the product with ``x (..., inputs)``."""
        if self._input is not x:
            self._input, self._parts = x, F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
        out = self._parts[index]
        if index == len(self.sizes) - 1:
            # What is held when tracing ends would become an output of the compiled layer.
            self._input, self._parts = None, ()
        return out


@torch.no_grad()
def join(mixer: nn.Module) -> bool:
    """Lay the weights of a module's projections side by side, and multiply once where it is compiled.

    Modules with other projections are left alone: other names, other classes than ``nn.Linear``, hooks, tied weights,
    or inputs, dtypes or biases that differ. Memory is needed for one copy of the weights while they move.

    Args:
        mixer: attention, or a gated delta net that :mod:`tracefp4.models.delta` steps.

    Returns:
        Whether they were joined.
    """
    names = next((group for group in GROUPS if hasattr(mixer, group[0])), ())
    parts: list[Any] = [getattr(mixer, name, None) for name in names]
    if not parts or not all(map(_plain, parts)) or not all(_alike(a, b) for a, b in pairwise(parts)):
        return False
    weight = _side_by_side([part.weight for part in parts])
    bias = None if parts[0].bias is None else _side_by_side([part.bias for part in parts])
    joined = Joined(weight, bias, tuple(part.out_features for part in parts))
    for index, part in enumerate(parts):
        part.forward = _forward(joined, index, part.forward)
    return True


def _forward(joined: Joined, index: int, own: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return joined.part(x, index) if torch.compiler.is_compiling() else own(x)

    return forward


def _plain(part: Any) -> bool:
    """Whether a module is a linear layer as PyTorch made it, with parameters that own their memory."""
    if type(part) is not nn.Linear or "forward" in vars(part):
        return False
    if part._forward_hooks or part._forward_pre_hooks:
        return False
    tensors = [part.weight] if part.bias is None else [part.weight, part.bias]
    return all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors)


def _alike(a: nn.Linear, b: nn.Linear) -> bool:
    same = a.in_features == b.in_features and a.weight.dtype is b.weight.dtype and a.weight.device == b.weight.device
    return same and (a.bias is None) == (b.bias is None) and a.weight is not b.weight


def _side_by_side(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of all, of which the parameters become views."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = view
    return whole
