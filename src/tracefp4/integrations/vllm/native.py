"""Which site each of vLLM's own FP4 paths shows, and what this process records.

On Blackwell the engine's kernels compute FP4 and a plugin can only look on, where a quantizer is a call of its own.
Read in the source of vLLM 0.32 (``model_executor/layers/fused_moe``); nothing in this table but our emulation was run
here, and the table says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracefp4.core import Kind
from tracefp4.formats.spec import Spec
from tracefp4.guidance.plan import Plan
from tracefp4.integrations.engines.wire import SiteLine


@dataclass(frozen=True, slots=True)
class Path:
    """One way in which vLLM computes routed experts in FP4."""

    name: str
    """Value of ``--moe-backend``."""
    enters: bool
    """Whether the experts' input is quantized outside of a kernel."""
    middle: bool
    """The same for the input of the down projection."""
    note: str


PATHS: tuple[Path, ...] = (
    Path("emulation", True, True, "fused_moe.utils:moe_kernel_quantize_input, both inputs; one scalar global scale"),
    Path(
        "cutlass", True, True, "scaled_fp4_experts_quant, silu_and_mul_scaled_fp4_experts_quant; rows sorted by expert"
    ),
    Path("flashinfer_cutedsl batched", True, True, "grouped rows, scales by expert"),
    Path("flashinfer_trtllm", True, False, "SwiGLU and its rounding inside the kernel"),
    Path("flashinfer_cutlass", False, False, "takes bfloat16 and rounds inside"),
    Path("deep_gemm mega", False, False, "rounds at dispatch, and inside"),
    Path("marlin", False, False, "W4A16: activations are not quantized at all; the default below Blackwell"),
)


def native_lines() -> list[SiteLine]:
    """The table of vLLM's own paths."""
    lines = []
    for path in PATHS:
        for kind, shown in ((Kind.EXPERTS_IN, path.enters), (Kind.EXPERTS_MID, path.middle)):
            state = "expected, not run" if shown else "fused away"
            lines.append(
                SiteLine(
                    str(kind), path.name, shown, shown, "not quantized" if path.name == "marlin" else state, path.note
                )
            )
    for kind in (Kind.K, Kind.V):
        note = "packed codes and scales lie in the cache's pages; V swizzled for trtllm-gen attention"
        lines.append(SiteLine(str(kind), "--kv-cache-dtype nvfp4", True, True, "expected, not run", note))
    return lines


def site_table(spec: Spec, plan: Plan | None, device: str) -> list[SiteLine]:
    """What this process records.

    Args:
        spec: what is quantized.
        plan: what is recorded.
        device: of the model. K and V are rounded by our attention backend, which there is for a CPU only.
    """
    planned = set() if plan is None else set(plan.kinds)
    lines = []
    for kind in (Kind.EXPERTS_IN, Kind.EXPERTS_MID, Kind.K, Kind.V):
        numerics = spec.for_kind(kind)
        if numerics is None:
            lines.append(SiteLine(str(kind), "emulation", False, False, "not quantized"))
        elif numerics.element != "e2m1":
            lines.append(
                SiteLine(str(kind), "emulation", False, True, "not quantized", f"{numerics.name}: no FP4 codes")
            )
        else:
            state = "recorded" if kind in planned else "not planned"
            run = state if device == "cpu" else "expected, not run"
            lines.append(SiteLine(str(kind), "emulation", True, True, run, numerics.name))
    return lines
