"""Which site each of SGLang's quantization paths shows: what a plugin can record where SGLang has FP4 kernels itself.

On Blackwell the engine's own kernels compute, and a plugin only looks on. It can look where a quantizer is a call of
its own, with the codes as its result. Read in the source of SGLang 0.5.23 (``srt/layers/moe/moe_runner``,
``srt/layers/quantization``); nothing in this table but the emulation was run here, and the table says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracefp4.core import Kind
from tracefp4.integrations.engines.wire import SiteLine


@dataclass(frozen=True, slots=True)
class Path:
    """One way in which SGLang computes routed experts in FP4."""

    name: str
    """Value of ``--moe-runner-backend``."""
    quantizer: str | None
    """Function that quantizes the experts' input outside of a kernel, ``module:name``; ``None``: inside."""
    middle: str | None
    """The same for the input of the down projection."""
    note: str


_MOE = "sglang.srt.layers.moe.moe_runner"
PATHS: tuple[Path, ...] = (
    Path(
        "flashinfer_trtllm",
        f"{_MOE}.flashinfer_trtllm:quantize_hidden_states_fp4",
        None,
        "one scalar global scale, or one a token with nvfp4_online; SwiGLU and its rounding inside the kernel",
    ),
    Path("flashinfer_cutlass", None, None, "takes bfloat16 and rounds inside; outside only at a DP all-gather"),
    Path(
        "flashinfer_cutedsl",
        "sglang.srt.layers.quantization.fp4_utils:fp4_quantize",
        None,
        "standard layout; the down projection's input inside the wrapper",
    ),
    Path("megamoe", None, None, "rounds at dispatch, and inside"),
    Path("marlin", None, None, "W4A16: activations are not quantized at all"),
)


def native_lines() -> list[SiteLine]:
    """The table of all native paths."""
    lines = []
    for path in PATHS:
        for kind, function in ((Kind.EXPERTS_IN, path.quantizer), (Kind.EXPERTS_MID, path.middle)):
            shown = function is not None
            state = "expected, not run" if shown else "fused away"
            if path.name == "marlin":
                state = "not quantized"
            lines.append(SiteLine(str(kind), path.name, shown, shown, state, path.note))
    for kind in (Kind.K, Kind.V):
        note = "packed codes and linear scales lie in the pool by slot; one gather when a request ends"
        lines.append(SiteLine(str(kind), "--kv-cache-dtype nvfp4", True, True, "expected, not run", note))
    return lines


def site_table(ours: Any) -> list[SiteLine]:
    """The table of this process: what its own path shows.

    Args:
        ours: the :class:`~tracefp4.integrations.sglang.worker.Worker`.
    """
    planned = set() if ours.plan is None else set(ours.plan.kinds)
    lines = []
    for kind in (Kind.EXPERTS_IN, Kind.EXPERTS_MID, Kind.K, Kind.V):
        numerics = ours.spec.for_kind(kind)
        if numerics is None:
            lines.append(SiteLine(str(kind), "emulation", False, False, "not quantized"))
            continue
        state = "recorded" if kind in planned else "not planned"
        lines.append(SiteLine(str(kind), "emulation", True, True, state, numerics.name))
    return lines
