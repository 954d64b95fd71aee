"""AdamW on FP32 master weights beneath a bfloat16 model.

A bfloat16 weight has 8 bits of precision: an update below 1/256 of its value vanishes when it is added in place. So the
optimizer keeps an FP32 *master* of each parameter, updates that, and rounds it into the model. The forward pass, and
with it the quantizer, sees the bfloat16 weights; the engine is synced from those as well, never from the masters.
Gradients of several micro-batches are added up in FP32 for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.config import OptimizerConfig
from tracefp4.errors import CheckpointError, NonFiniteError


class MasterAdamW:
    """AdamW over FP32 copies of the trainable parameters of a model.

    Args:
        named: ``(name, parameter)`` pairs; parameters that need no gradient are left out.
        config: learning rate, moments, decay, clipping.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.params = {name: p for name, p in named if p.requires_grad}
        self.config = config
        self.steps = 0
        self.masters = {
            name: p.detach().to(torch.float32, copy=True).requires_grad_(False) for name, p in self.params.items()
        }
        self._adam = torch.optim.AdamW(
            list(self.masters.values()),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )

    def collect(self) -> None:
        """Add the model's gradients to those of the masters, in FP32, and drop them from the model.

        To be called after each micro-batch: bfloat16 gradients that are added up in place lose what is below 1/256 of
        the sum, more with every micro-batch.
        """
        for name, p in self.params.items():
            if p.grad is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                master.grad = p.grad.to(torch.float32)
            else:
                master.grad.add_(p.grad)
            p.grad = None

    def zero_grad(self) -> None:
        """Drop all gradients, of the model and of the masters."""
        for name, p in self.params.items():
            p.grad = self.masters[name].grad = None

    def gradients(self) -> dict[str, Tensor]:
        """FP32 gradients by name of the parameter, as collected so far; parameters without one are left out."""
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the collected gradients, float32 scalar on the device."""
        norms = [torch.linalg.vector_norm(grad) for grad in self.gradients().values()]
        if not norms:
            raise NonFiniteError("no parameter has a gradient; the loss does not depend on the model")
        return torch.linalg.vector_norm(torch.stack(norms))

    def step(self, lr: float | None = None) -> float:
        """Clip, update the masters, round them into the model, and drop the gradients.

        Args:
            lr: learning rate of this step; the configured one with its warm-up when ``None``.

        Returns:
            The gradient norm before clipping.

        Raises:
            NonFiniteError: the norm is NaN or infinite. Only the gradients are gone then.
        """
        self.collect()
        norm = float(self.grad_norm())
        if not math.isfinite(norm):
            self.zero_grad()
            raise NonFiniteError(f"gradient norm is {norm} at optimizer step {self.steps}; the step was not applied")
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate() if lr is None else lr
        if scale < 1.0:
            for grad in self.gradients().values():
                grad.mul_(scale)
        self._adam.step()
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(self.masters[name])
        self.zero_grad()
        self.steps += 1
        return norm

    def learning_rate(self) -> float:
        """Configured rate at the current step, with linear warm-up."""
        if self.config.warmup_steps == 0:
            return self.config.lr
        return self.config.lr * min(1.0, (self.steps + 1) / self.config.warmup_steps)

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, for a checkpoint."""
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            out[f"master.{name}"] = master
            moments: Mapping[str, Any] = self._adam.state.get(master, {})
            for key in ("exp_avg", "exp_avg_sq", "step"):
                if key in moments:
                    out[f"{key}.{name}"] = moments[key]
        return out

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Restore :meth:`state`; raises :class:`CheckpointError` when a parameter is missing or has another shape."""
        for name, master in self.masters.items():
            saved = state.get(f"master.{name}")
            if saved is None or saved.shape != master.shape:
                raise CheckpointError(f"optimizer state of {name!r} is missing or has another shape")
            master.copy_(saved)
            if f"exp_avg.{name}" in state:
                self._adam.state[master] = {
                    "exp_avg": state[f"exp_avg.{name}"].to(master.device),
                    "exp_avg_sq": state[f"exp_avg_sq.{name}"].to(master.device),
                    "step": state[f"step.{name}"].cpu(),
                }
        self.steps = steps
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(self.masters[name])
