"""Which site each of SGLang's quantization paths shows: what a plugin can record where SGLang has FP4 kernels itself.

On Blackwell the engine's own kernels compute, and a plugin only looks on. It can look where a quantizer is a call of
its own, with the codes as its result. Read in the source of SGLang 0.5.23 (``srt/layers/moe/moe_runner``,
``srt/layers/quantization``); nothing in this table but the emulation was run here, and the table says so.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tracefp4.core import Kind
from tracefp4.integrations.engines.sites import CACHE, observed_lines, path_lines
from tracefp4.integrations.engines.wire import SiteLine, State
from tracefp4.integrations.sglang.observe import Watch

EMULATION = "emulation"
"""Name of our own path in the table."""

_MOE = "sglang.srt.layers.moe"
EXPERTS = f"{_MOE}.fused_moe_triton.layer.FusedMoE.forward_impl"
"""What every path passes through; hooked around it, :meth:`Watch.experts` notes the layer."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of SGLang, and what is bound to it."""

    target: str
    """Where the callers find it: importers by name are found by SGLang's own registry."""
    method: str
    """Of :class:`~tracefp4.integrations.sglang.observe.Watch`."""
    kind: str = "after"


_STATIC = Hook("sglang.srt.layers.quantization.fp4_utils.fp4_quantize", "fp4_quantize")
_PER_TOKEN = Hook("flashinfer.nvfp4_quantize", "per_token")
_GATHERED = Hook(f"{_MOE}.token_dispatcher.standard.fp4_quantize_flashinfer", "fp4_quantize")
_MASKED = f"{_MOE}.flashinfer_cutedsl_moe"
_DEEPEP = (
    Hook(f"{_MOE}.token_dispatcher.deepep._DeepEPDispatcherImplLowLatency.dispatch_b", "dispatched"),
    Hook(f"{_MASKED}.flashinfer_cutedsl_moe_masked", "masked", "around"),
    Hook(f"{_MASKED}.scaled_fp4_grouped_quantize", "masked_input"),
    Hook(f"{_MASKED}.silu_and_mul_scaled_nvfp4_experts_quantize", "masked_middle"),
)


@dataclass(frozen=True, slots=True)
class Path:
    """One way in which SGLang computes routed experts in FP4."""

    name: str
    """Value of ``--moe-runner-backend``, and what else selects it."""
    hooks: tuple[Hook, ...]
    """Quantizers of the experts' input outside of a kernel; none: inside."""
    middle: State
    """What becomes of the input of the down projection."""
    note: str


PATHS: tuple[Path, ...] = (
    Path("flashinfer_trtllm", (_STATIC,), "fused away", "static scalar scale; SwiGLU and its rounding in the kernel"),
    Path("flashinfer_trtllm, nvfp4_online", (_PER_TOKEN,), "fused away", "one FP32 scale a token"),
    Path("flashinfer_cutedsl", (_STATIC,), "fused away", "static scalar scale; the rest inside the wrapper"),
    Path("flashinfer_cutedsl, nvfp4_online", (_PER_TOKEN,), "fused away", "one FP32 scale a token"),
    Path(
        "flashinfer_cutedsl, deepep",
        _DEEPEP,
        "expected, not run",
        "masked kernels: rows by expert, scales in tiles; on one rank, without two-batch overlap",
    ),
    Path("flashinfer_cutlass", (), "fused away", "takes bfloat16 and rounds inside"),
    Path(
        "flashinfer_cutlass, FP4 all-gather",
        (_GATHERED,),
        "fused away",
        "data parallel attention: each rank rounds its own tokens before they are gathered",
    ),
    Path("megamoe", (), "fused away", "rounds at dispatch into the kernel's own buffer, and inside"),
    Path("marlin", (), "not quantized", "W4A16: activations are not quantized at all"),
)


def native_lines() -> list[SiteLine]:
    """The table of all native paths."""
    lines = [line for path in PATHS for line in path_lines(path.name, bool(path.hooks), path.middle, path.note)]
    for kind in (Kind.K, Kind.V):
        note = "packed codes and linear scales lie in the pool by slot; one gather when a request ends"
        lines.append(SiteLine(str(kind), CACHE, True, True, "expected, not run", note))
    return lines


def running_path(backend: str, dispatch: str, quantization: str | None) -> str:
    """Name of the path that a configuration takes.

    Args:
        backend: value of ``--moe-runner-backend``.
        dispatch: value of ``--moe-a2a-backend``.
        quantization: value of ``--quantization``.
    """
    if dispatch == "megamoe" or backend == "flashinfer_megamoe":
        return "megamoe"
    name = backend.removesuffix("_routed")
    if name == "flashinfer_cutedsl" and dispatch == "deepep":
        return "flashinfer_cutedsl, deepep"
    if quantization == "nvfp4_online" and name in ("flashinfer_trtllm", "flashinfer_cutedsl"):
        return f"{name}, nvfp4_online"
    return name


def observed(running: str) -> list[SiteLine]:
    """The table of a process whose own kernels compute, on the path ``running``."""
    bound = available()
    missing = {path.name for path in PATHS if any(hook.target not in bound for hook in path.hooks)}
    return observed_lines(native_lines(), running, missing)


def site_table(ours: Any) -> list[SiteLine]:
    """The table of this process: what its own path shows.

    Args:
        ours: the :class:`~tracefp4.integrations.sglang.worker.Worker`.
    """
    if not ours.settings.emulate:
        return observed(_running(ours.quantization))
    planned = set() if ours.plan is None else set(ours.plan.kinds)
    lines = []
    for kind in (Kind.EXPERTS_IN, Kind.EXPERTS_MID, Kind.K, Kind.V):
        numerics = ours.spec.for_kind(kind)
        if numerics is None:
            lines.append(SiteLine(str(kind), EMULATION, False, False, "not quantized"))
            continue
        state = "recorded" if kind in planned else "not planned"
        lines.append(SiteLine(str(kind), EMULATION, True, True, state, numerics.name))
    return lines


def _running(quantization: str | None) -> str:
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend

    return running_path(get_moe_runner_backend().value, get_moe_a2a_backend().value, quantization)


def available() -> list[str]:
    """Targets of :data:`PATHS` that can be imported here."""
    return [target for target in {hook.target: None for path in PATHS for hook in path.hooks} if _exists(target)]


def bind_observers(register: Callable[[str, Any, str], None], watch: Watch) -> list[str]:
    """Hook every quantizer of :data:`PATHS` that is :func:`available`; returns their targets.

    Args:
        register: ``(target, hook, kind)`` with kind ``after`` or ``around``.
        watch: what sees their results.
    """
    register(EXPERTS, watch.experts, "around")
    hooks = {hook.target: hook for path in PATHS for hook in path.hooks}
    bound = available()
    for target in bound:
        register(target, getattr(watch, hooks[target].method), hooks[target].kind)
    return bound


def _exists(target: str) -> bool:
    try:
        return pkgutil.resolve_name(target) is not None
    except (ImportError, AttributeError):
        return False
