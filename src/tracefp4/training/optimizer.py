"""AdamW on FP32 master weights beneath a bfloat16 model.

A bfloat16 weight has 8 bits of precision: an update below 1/256 of its value vanishes when it is added in place. So the
optimizer keeps an FP32 *master* of each parameter, updates that, and rounds it into the model. The forward pass, and
with it the quantizer, sees the bfloat16 weights; the engine is synced from those as well, never from the masters.
Gradients of several micro-batches are added up in FP32 for the same reason.

Of a sharded model (:mod:`tracefp4.training.sharding`) each rank updates its part: the FP32 shards are the masters, and
the layers round them when they gather. Only the gradient norm needs the other ranks.
"""

# pyright: reportPrivateImportUsage=false
# PyTorch has many tensors in one launch only under names with an underscore.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tracefp4.config import OptimizerConfig
from tracefp4.errors import CheckpointError, ConfigError, NonFiniteError
from tracefp4.training.sharding import Lazy, local, part_of, whole

_SMALL = 1 << 22
"""Values of a gradient up to which it is widened beside others."""
_TOGETHER = 1 << 25
"""Values that are widened at a time."""


class MasterAdamW:
    """AdamW over FP32 copies of the trainable parameters of a model.

    Args:
        named: ``(name, parameter)`` pairs; parameters that need no gradient are left out.
        config: learning rate, moments, decay, clipping.
        total: optimizer steps after which a falling learning rate is 0; what a schedule other than ``constant`` needs.

    Raises:
        ConfigError: a falling learning rate without ``total``.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, total: int = 0) -> None:
        if config.schedule != "constant" and total < 1:
            raise ConfigError(
                f"optimizer.schedule = {config.schedule!r} needs to know how many optimizer steps there are"
            )
        self.params = {name: p for name, p in named if p.requires_grad}
        self.config, self._total = config, total
        self.steps = 0
        self.masters = {name: _master(p) for name, p in self.params.items()}
        self._mesh = next((p.device_mesh for p in self.params.values() if isinstance(p, DTensor)), None)
        # Fused: one pass without temporaries, which otherwise take the size of the masters once or twice more.
        self._adam: Any = torch.optim.AdamW(
            list(self.masters.values()),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def collect(self) -> None:
        """Add the model's gradients to those of the masters, in FP32, and drop them from the model.

        To be called after each micro-batch: bfloat16 gradients that are added up in place lose what is below 1/256 of
        the sum, more with every micro-batch.
        """
        first: tuple[list[Tensor], list[Tensor]] = [], []
        more: tuple[list[Tensor], list[Tensor]] = [], []
        for name, p in self.params.items():
            if p.grad is None:
                continue
            master, grad = self.masters[name], local(p.grad)
            p.grad = None
            if master.grad is not None:
                more[0].append(master.grad)
                more[1].append(grad)
            elif grad.dtype is torch.float32:
                master.grad = grad
            else:
                master.grad = torch.empty_like(grad, dtype=torch.float32)
                first[0].append(master.grad)
                first[1].append(grad)
        if first[0]:
            torch._foreach_copy_(*first)
        _add(*more)

    def zero_grad(self) -> None:
        """Drop all gradients, of the model and of the masters."""
        for name, p in self.params.items():
            p.grad = self.masters[name].grad = None

    def gradients(self) -> dict[str, Tensor]:
        """FP32 gradients by name of the parameter, as collected so far; parameters without one are left out.

        Of a sharded model, this rank's parts.
        """
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the collected gradients, float32 scalar on the device."""
        grads = list(self.gradients().values())
        if not grads:
            raise NonFiniteError("no parameter has a gradient; the loss does not depend on the model")
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if self._mesh is None:
            return norm
        square = norm.square()
        torch.distributed.all_reduce(square, group=self._mesh.get_group())
        return square.sqrt()

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
        norm = self.grad_norm()
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate() if lr is None else lr
        # Clipping, and leaving a step out, happen in the same pass on the device: the host reads the norm afterwards.
        self._adam.grad_scale = ((norm + 1e-6) / self.config.max_grad_norm).clamp(min=1.0)
        self._adam.found_inf = norm.isfinite().logical_not().float()
        self._adam.step()
        self._round()
        self.zero_grad()
        found = float(norm)
        if not math.isfinite(found):
            raise NonFiniteError(f"gradient norm is {found} at optimizer step {self.steps}; the step was not applied")
        self.steps += 1
        return found

    @torch.no_grad()
    def _round(self) -> None:
        """Masters into the model. A sharded model's parameters are its masters."""
        own = [(p, self.masters[name]) for name, p in self.params.items() if not isinstance(p, DTensor)]
        if own:
            torch._foreach_copy_([p for p, _ in own], [master for _, master in own])

    def learning_rate(self) -> float:
        """Rate of the current step: linear warm-up, then what the schedule makes of the configured one."""
        config = self.config
        if self.steps < config.warmup_steps:
            return config.lr * (self.steps + 1) / config.warmup_steps
        if config.schedule == "constant":
            return config.lr
        passed = min(1.0, (self.steps - config.warmup_steps) / max(1, self._total - config.warmup_steps))
        return config.lr * (1.0 - passed if config.schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * passed))

    def state(self) -> Mapping[str, Tensor]:
        """Masters and moments by name, for a checkpoint; those of a sharded model are gathered one by one."""
        parts: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, master in self.masters.items():
            parts[f"master.{name}"] = (master, self.params[name])
            moments: Mapping[str, Any] = self._adam.state.get(master, {})
            for key in ("exp_avg", "exp_avg_sq"):
                if key in moments:
                    parts[f"{key}.{name}"] = (moments[key], self.params[name])
            if "step" in moments:
                parts[f"step.{name}"] = (moments["step"], None)
        return Lazy({key: partial(_gathered, *part) for key, part in parts.items()})

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Restore :meth:`state`; raises :class:`CheckpointError` when a parameter is missing or has another shape.

        A state is that of the whole model, on however many ranks it was written.
        """
        for name, master in self.masters.items():
            p, saved = self.params[name], state.get(f"master.{name}")
            if saved is None or saved.shape != p.shape:
                raise CheckpointError(f"optimizer state of {name!r} is missing or has another shape")
            master.copy_(part_of(saved.to(master.device), p))
            if f"exp_avg.{name}" in state:
                # Laid out as the master is: on a CPU the fused pass walks through memory without looking at strides.
                moments = {
                    key: torch.empty_like(master).copy_(part_of(state[f"{key}.{name}"].to(master.device), p))
                    for key in ("exp_avg", "exp_avg_sq")
                }
                self._adam.state[master] = {"step": state[f"step.{name}"].to(master.device, copy=True), **moments}
        self.steps = steps
        self._round()


def _add(totals: list[Tensor], grads: list[Tensor]) -> None:
    """Add narrow gradients to their FP32 totals, in as few launches as there can be.

    PyTorch adds many tensors in one launch only if all are of one dtype. So on a GPU small gradients are widened
    together first; large ones, each of which is worth a launch, are added as they are.
    """
    alone: tuple[list[Tensor], list[Tensor]] = [], []
    together: tuple[list[Tensor], list[Tensor]] = [], []
    for total, grad in zip(totals, grads, strict=True):
        chosen = together if not grad.is_cpu and grad.numel() <= _SMALL else alone
        chosen[0].append(total)
        chosen[1].append(grad)
    if alone[0]:
        torch._foreach_add_(*alone)
    for part in _parts(together[1]):
        wide = [torch.empty_like(grad, dtype=torch.float32) for grad in together[1][part]]
        torch._foreach_copy_(wide, together[1][part])
        torch._foreach_add_(together[0][part], wide)


def _parts(tensors: list[Tensor]) -> Iterator[slice]:
    """Consecutive parts of at most :data:`_TOGETHER` values, or one tensor."""
    start = size = 0
    for index, tensor in enumerate(tensors):
        if index > start and size + tensor.numel() > _TOGETHER:
            yield slice(start, index)
            start, size = index, 0
        size += tensor.numel()
    if tensors:
        yield slice(start, len(tensors))


def _master(parameter: nn.Parameter) -> Tensor:
    if isinstance(parameter, DTensor):
        return local(parameter)
    return parameter.detach().to(torch.float32, copy=True).requires_grad_(False)


def _gathered(part: Tensor, like: Tensor | None) -> Tensor:
    return part if like is None else whole(part, like)
