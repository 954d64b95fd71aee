"""Launches of a training step on a GPU, counted without one.

    python benchmarks/training_launches.py [--operations]

The SmolLM2-MoE shape of ``tracefp4 bench train`` on the ``meta`` device, where tensors have shapes but no values. The
path is that of a GPU: Triton kernels are replaced by entries in a tally, attention is the flash operator, and gradients
are added as on a GPU. Each operator that PyTorch dispatches and that is neither a view nor an allocation counts as one
launch. That is a floor: a sort, a large reduction or attention's backward pass launch more than one kernel, and a
foreach operator launches one for some hundred tensors. An operator that would wait for the device (``item``,
``nonzero``) is counted as a wait.

What a layer costs is the difference between models of three layers and of one.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tracefp4.kernels
from tracefp4.evaluation.bench_train import ARMS, FULL, MICRO_BATCHES, SHAPES, SPEC, Arm, Case
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, restrict, token_hash
from tracefp4.guidance.runs import SiteRuns
from tracefp4.kernels import runtime
from tracefp4.models import norms, replay, routing
from tracefp4.models.sites import Choice
from tracefp4.training.sites import TrainerSites

SEQUENCES, ROWS = 16, 512
NAMES = ("bf16", "transformers", "fp4 qat", "fp4 guided", "fp4 guided s2")
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

    def add(self, name: str, times: int = 1) -> None:
        """Count launches."""
        self.counts[self.phase][name] += times

    @contextmanager
    def within(self, phase: str, again: str = "") -> Iterator[None]:
        """Count for ``phase``, or for ``again`` inside a backward pass."""
        before, self.phase = self.phase, again if again and self.phase == "backward" else phase
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it, if it is one of the device."""
        kwargs = kwargs or {}
        name = func.overloadpacket._qualified_op_name
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in WAITS and any(x.is_meta for x in inputs):
            self.add(f"WAIT {name}")
            if name == "aten::_local_scalar_dense":
                return 1.0
        result = func(*args, **kwargs)
        here = any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves(result)) or any(x.is_meta for x in inputs)
        if here and name not in WAITS and not (func.is_view or name in FREE or name.startswith(("prim", "profiler"))):
            mixed = name == "aten::_foreach_add_" and len({x.dtype for x in inputs}) > 1
            self.add(name, len(args[0]) if mixed else 1)
        return result


class _Stub:
    """A Triton kernel that only counts."""

    def __init__(self, tally: Tally, name: str) -> None:
        self._tally, self._name = tally, name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: self._tally.add(f"triton {self._name}")


class _AdamW:
    """Takes the place of PyTorch's fused AdamW, which refuses tensors without values: one launch."""

    def __init__(self, tally: Tally) -> None:
        self._tally, self.param_groups, self.state = tally, [{}], {}

    def step(self) -> None:
        """Count."""
        self._tally.add("aten::_fused_adamw_")


def _flash(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """What ``scaled_dot_product_attention`` chooses on a GPU for bfloat16 without a mask."""
    op = torch.ops.aten._scaled_dot_product_flash_attention
    return op(q, k, v, 0.0, kwargs["is_causal"], False, scale=kwargs.get("scale"))[0]


@contextmanager
def pretended(tally: Tally) -> Iterator[None]:
    """Take the path of a GPU for tensors on ``meta``."""
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        for info in pkgutil.iter_modules(tracefp4.kernels.__path__):
            module = importlib.import_module(f"tracefp4.kernels.{info.name}")
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction):
                    put(module, name, _Stub(tally, name))
        put(runtime, "_interpreting", True)
        put(torch, "is_autocast_enabled", lambda *_: False)
        put(F, "scaled_dot_product_attention", _flash)
        put(torch.optim, "AdamW", lambda *_, **__: _AdamW(tally))
        # What is found by trying a module out, which takes values.
        put(replay, "plain", lambda router, name: Choice(router.top_k, True, torch.bfloat16))
        put(norms, "is_plain", lambda module: hasattr(module, "variance_epsilon"))
        yield


def _record(case: Case) -> None:
    """Give examples guidance of the right shapes."""
    spec = get_spec(SPEC)
    sites, rows = {}, case.micro_batches[0][0].rows
    shapes = [*TrainerSites(case.layout, spec).shapes.values()]
    for shape in Plan.parse(FULL).select(shapes, len(case.layout.experts)):
        codes = torch.zeros(rows, shape.vectors, shape.width, dtype=torch.uint8)
        scales = torch.zeros(rows, shape.vectors, shape.width // shape.block, dtype=torch.uint8)
        scale = torch.ones(rows, shape.vectors) if shape.token_scale else None
        sites[shape.site] = SiteRecord.pack(shape, codes, scales, scale, 1)
    for e in (e for group in case.micro_batches for e in group):
        valid = torch.ones(rows, dtype=torch.bool)
        record = Record(FULL, token_hash(e.tokens), spec.hash, 0, rows, valid, SiteRuns.of(sites))
        for plan in {ARMS[name].plan for name in NAMES if ARMS[name].plan}:
            cut = restrict(record, Plan.parse(plan), shapes, len(case.layout.experts))
            case.guidance.setdefault(plan, {})[e.index] = replace(cut, sites=SiteRuns.of(cut.sites))


def _mark(case: Case, tally: Tally) -> None:
    """Tell phases apart."""

    def during(call: Callable[..., Any], phase: str, again: str = "") -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with tally.within(phase, again):
                return call(*args, **kwargs)

        return run

    for layer in case.model.get_decoder().layers:
        plain = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda fn, *args, plain=plain: plain(during(fn, "forward", "again"), *args)
    case.optimizer.collect = during(case.optimizer.collect, "optimizer")
    case.optimizer.step = during(case.optimizer.step, "optimizer")


def _choose_rules(case: Case) -> None:
    for module in case.model.modules():
        for hook in module._forward_hooks.values():
            if isinstance(hook, routing._Replay):
                hook.rule = routing.softmax_renormalised


def count(arm: Arm, layers: int) -> dict[str, Counter[str]]:
    """Launches of the second step, by phase."""
    tally, backward = Tally(), Tensor.backward

    def marked(self: Tensor, *args: Any, **kwargs: Any) -> None:
        with tally.within("backward"):
            backward(self, *args, **kwargs)

    with pretended(tally), patch.object(Tensor, "backward", marked):
        case = Case.make(replace(SHAPES["smollm2-moe"], layers=layers), SEQUENCES, ROWS, torch.device("meta"))
        _record(case)
        _mark(case, tally)
        with case.step(arm) as step, tally:
            _choose_rules(case)
            step()
            for counter in tally.counts.values():
                counter.clear()
            step()
    return tally.counts


def main() -> int:
    """Print launches of each arm."""
    layers = SHAPES["smollm2-moe"].layers
    print(
        f"{'launches':14}{'forward':>9}{'again':>7}{'backward':>10}{'head':>7}{'optimizer':>11}{'step':>8}{'waits':>7}"
    )
    for name in NAMES:
        one, three = count(ARMS[name], 1), count(ARMS[name], 3)
        grown = {phase: Counter(three[phase]) for phase in PHASES}
        for phase in PHASES:
            grown[phase].subtract(one[phase])
        each = [sum(grown[phase].values()) / 2 / MICRO_BATCHES for phase in PHASES]
        total = Counter[str]()
        for phase in PHASES:
            for key in one[phase] | three[phase]:
                total[key] += one[phase][key] + (layers - 1) * (three[phase][key] - one[phase][key]) // 2
        rest = {phase: sum(one[phase].values()) - MICRO_BATCHES * n for phase, n in zip(PHASES, each, strict=True)}
        waits = sum(times for key, times in total.items() if key.startswith("WAIT"))
        head, optimizer = (rest[p] + layers * MICRO_BATCHES * n for p, n in zip(PHASES[3:], each[3:], strict=True))
        head += sum(rest[p] for p in PHASES[:3])
        print(f"{name:14}{each[0]:9.0f}{each[1]:7.0f}{each[2]:10.0f}{head:7.0f}{optimizer:11.0f}"
              f"{sum(total.values()):8}{waits:7}")  # fmt: skip
        if "--operations" in sys.argv:
            for phase in PHASES[:3]:
                print(f"  {phase}:", {k: v / 2 / MICRO_BATCHES for k, v in grown[phase].most_common() if v})
    return 0


if __name__ == "__main__":
    sys.exit(main())
