"""Which site each of SGLang's quantization paths shows: what a plugin can record where SGLang has FP4 kernels itself.

On Blackwell the engine's own kernels compute, and a plugin only looks on. It can look where a quantizer is a call of
its own, with the codes as its result. Read in the source of SGLang 0.5.23 (``srt/layers/moe/moe_runner``,
``srt/layers/quantization``); nothing in this table but the emulation was run here, and the table says so.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tracefp4.core import Kind
from tracefp4.integrations.engines.wire import SiteLine, State
from tracefp4.integrations.sglang.observe import Watch, note_layer

EMULATION = "emulation"
"""Name of our own path in the table."""


@dataclass(frozen=True, slots=True)
class Path:
    """One way in which SGLang computes routed experts in FP4."""

    name: str
    """Value of ``--moe-runner-backend``, and what else selects it."""
    quantizer: str | None
    """Function that quantizes the experts' input outside of a kernel; ``None``: inside."""
    hook: str | None
    """Method of :class:`~tracefp4.integrations.sglang.observe.Watch` that is bound after it."""
    middle: State
    """What becomes of the input of the down projection."""
    note: str


_MOE = "sglang.srt.layers.moe.moe_runner"
PATHS: tuple[Path, ...] = (
    Path(
        "flashinfer_trtllm",
        f"{_MOE}.flashinfer_trtllm.quantize_hidden_states_fp4",
        "hidden_states",
        "fused away",
        "static scalar scale (modelopt_fp4); SwiGLU and its rounding inside the kernel",
    ),
    Path(
        "flashinfer_trtllm, nvfp4_online",
        "flashinfer.nvfp4_quantize",
        "per_token",
        "fused away",
        "one FP32 scale a token",
    ),
    Path(
        "flashinfer_cutedsl",
        f"{_MOE}.flashinfer_cutedsl.fp4_quantize",
        "fp4_quantize",
        "fused away",
        "static scalar scale; the down projection's input inside the wrapper",
    ),
    Path(
        "flashinfer_cutedsl, nvfp4_online", "flashinfer.nvfp4_quantize", "per_token", "fused away", "one scale a token"
    ),
    Path("flashinfer_cutedsl masked", None, None, "not bound", "DeepEP only, which is refused: rows by expert"),
    Path("flashinfer_cutlass", None, None, "fused away", "takes bfloat16 and rounds inside"),
    Path("megamoe", None, None, "fused away", "rounds at dispatch, and inside"),
    Path("marlin", None, None, "not quantized", "W4A16: activations are not quantized at all"),
)


def native_lines() -> list[SiteLine]:
    """The table of all native paths."""
    lines = []
    for path in PATHS:
        shown = path.hook is not None
        state = "expected, not run" if shown else path.middle
        lines.append(SiteLine(str(Kind.EXPERTS_IN), path.name, shown, shown, state, path.note))
        lines.append(SiteLine(str(Kind.EXPERTS_MID), path.name, False, False, path.middle, path.note))
    for kind in (Kind.K, Kind.V):
        note = "packed codes and linear scales lie in the pool by slot; one gather when a request ends"
        lines.append(SiteLine(str(kind), "--kv-cache-dtype nvfp4", True, True, "expected, not run", note))
    return lines


def site_table(ours: Any) -> list[SiteLine]:
    """The table of this process: what its own path shows.

    Args:
        ours: the :class:`~tracefp4.integrations.sglang.worker.Worker`.
    """
    if not ours.settings.emulate:
        backend = _backend()
        chosen = [line for line in native_lines() if line.path.startswith((backend, "--kv-cache-dtype"))]
        return chosen or native_lines()
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


def _backend() -> str:
    from sglang.srt.layers.moe.utils import get_moe_runner_backend

    return get_moe_runner_backend().value


def bind_observers(register: Callable[[str, Any, str], None], watch: Watch) -> list[str]:
    """Hook every quantizer of :data:`PATHS` that can be imported here; returns their names.

    Args:
        register: ``(target, hook, kind)`` with kind ``after`` or ``around``.
        watch: what sees their results.
    """
    register("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl", note_layer, "around")
    bound: list[str] = []
    for path in PATHS:
        if path.quantizer is not None and path.hook is not None and path.quantizer not in bound:
            module, _, name = path.quantizer.rpartition(".")
            if importlib.util.find_spec(module.partition(".")[0]) is None or not _has(module, name):
                continue
            register(path.quantizer, getattr(watch, path.hook), "after")
            bound.append(path.quantizer)
    return bound


def _has(module: str, name: str) -> bool:
    try:
        return getattr(importlib.import_module(module), name, None) is not None
    except ImportError:
        return False
