"""Launches of a training step on a GPU, counted without one.

    python benchmarks/training_launches.py [--operations]

The SmolLM2-MoE shape of ``tracefp4 bench train`` on the ``meta`` device, where tensors have shapes and no values. The
path is that of a GPU: Triton kernels are replaced by entries in a tally, attention is the flash operator, and the
optimizer takes its fused step. Each operator that PyTorch dispatches and that is neither a view nor an allocation counts
as one launch. That is a floor: a sort, a large reduction or attention's backward pass launch more than one kernel, and
a foreach operator launches one for some hundred tensors. An operator that would wait for the device (``item``,
``nonzero``) has no answer here and is listed as a wait.

What a layer costs is the difference between models of three layers and of one.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tracefp4.kernels
from tracefp4.evaluation.bench_train import ARMS, SHAPES, Arm, Case
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, token_hash
from tracefp4.kernels import runtime
from tracefp4.models import routing
from tracefp4.training.sites import TrainerSites

SEQUENCES, ROWS = 16, 512
NAMES = ("bf16", "transformers", "fp4 qat", "fp4 guided")
PHASES = ("forward", "again", "backward", "head", "optimizer")
FREE = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::view", "aten::_unsafe_view", "aten::_reshape_alias", "aten::detach", "aten::alias", "aten::lift_fresh",
    "aten::record_stream", "aten::is_same_size", "aten::resize_",
}  # fmt: skip
"""Operators without a kernel, besides views."""
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}


class Tally(TorchDispatchMode):
    """Counts operators by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.counts = "head", {phase: Counter[str]() for phase in PHASES}

    def add(self, name: str) -> None:
        """Count one launch."""
        self.counts[self.phase][name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        name = func.overloadpacket._qualified_op_name
        if not (func.is_view or name in FREE or name.startswith("prim")):
            self.add(f"WAIT {name}" if name in WAITS else name)
        if name == "aten::_local_scalar_dense":
            return 1.0
        return func(*args, **(kwargs or {}))


class _Stub:
    """A Triton kernel that only counts."""

    def __init__(self, tally: Tally, name: str) -> None:
        self._tally, self._name = tally, name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: self._tally.add(f"triton {self._name}")


def _stub_kernels(tally: Tally) -> None:
    for info in pkgutil.iter_modules(tracefp4.kernels.__path__):
        module = importlib.import_module(f"tracefp4.kernels.{info.name}")
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction):
                setattr(module, name, _Stub(tally, name))


def _flash(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """What ``scaled_dot_product_attention`` chooses on a GPU for bfloat16 without a mask."""
    op = torch.ops.aten._scaled_dot_product_flash_attention
    return op(q, k, v, 0.0, kwargs["is_causal"], False, scale=kwargs.get("scale"))[0]


def _record(case: Case, sequences: int) -> None:
    """Give examples guidance of the right shapes."""
    spec = get_spec("nvfp4-w4a4-kv4")
    sites, rows = {}, case.micro_batches[0][0].rows
    for shape in Plan.parse("r1-all+mid").select(TrainerSites(case.layout, spec).shapes.values(), len(case.layout.experts)):
        codes = torch.zeros(rows, shape.vectors, shape.width, dtype=torch.uint8)
        scales = torch.zeros(rows, shape.vectors, shape.width // shape.block, dtype=torch.uint8)
        scale = torch.ones(rows, shape.vectors) if shape.token_scale else None
        sites[shape.site] = SiteRecord.pack(shape, codes, scales, scale, 1)
    for group in case.micro_batches:
        for e in group:
            valid = torch.ones(rows, dtype=torch.bool)
            e.record = Record("r1-all+mid", token_hash(e.tokens), spec.hash, 0, rows, valid, sites)


def _within(tally: Tally, layer: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        before, tally.phase = tally.phase, "forward" if tally.phase == "head" else "again"
        try:
            return layer(*args, **kwargs)
        finally:
            tally.phase = before

    return forward


def _mark(case: Case, tally: Tally) -> None:
    """Tell phases apart: a layer's forward pass counts as ``again`` inside a backward pass."""
    for layer in case.model.get_decoder().layers:
        plain = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda fn, *args, plain=plain: plain(_within(tally, fn), *args)
    collect, step = case.optimizer.collect, case.optimizer.step
    backward = Tensor.backward

    def during(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before, tally.phase = tally.phase, phase
            try:
                return call(*args, **kwargs)
            finally:
                tally.phase = before

        return run

    Tensor.backward = during("backward", backward)  # pyright: ignore[reportAttributeAccessIssue]
    case.optimizer.collect = during("optimizer", collect)
    case.optimizer.step = during("optimizer", step)


def _choose_rules(case: Case) -> None:
    for module in case.model.modules():
        for hook in module._forward_hooks.values():
            if isinstance(hook, routing._Replay):
                hook.rule = routing.softmax_renormalised


def count(arm: Arm, layers: int) -> dict[str, Counter[str]]:
    """Launches of the second step, by phase."""
    tally = Tally()
    _stub_kernels(tally)
    backward = Tensor.backward
    try:
        case = Case.make(replace(SHAPES["smollm2-moe"], layers=layers), SEQUENCES, ROWS, torch.device("meta"))
        case.optimizer._fused = True
        _record(case, SEQUENCES)
        _mark(case, tally)
        with case.step(arm) as step:
            _choose_rules(case)
            with tally:
                step()
                for counter in tally.counts.values():
                    counter.clear()
                step()
    finally:
        Tensor.backward = backward
    return tally.counts
