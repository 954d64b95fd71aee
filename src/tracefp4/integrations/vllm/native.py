"""Which site each of vLLM's own FP4 paths shows, and what this process records.

On Blackwell the engine's kernels compute FP4 and a plugin can only look on, where a quantizer is a call of its own.
Read in the source of vLLM 0.32 (``model_executor/layers/fused_moe``); nothing in this table but our emulation was run
here, and the table says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracefp4.core import EXPERT_KINDS, Kind
from tracefp4.formats.spec import Spec
from tracefp4.guidance.plan import Plan
from tracefp4.integrations.engines.sites import CACHE, observed_lines, path_lines
from tracefp4.integrations.engines.wire import SiteLine, State
from tracefp4.integrations.vllm.binding import find
from tracefp4.integrations.vllm.own_pages import DTYPE

_LAYERS = "vllm.model_executor.layers"
_MOE = f"{_LAYERS}.fused_moe"


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of vLLM, and the wrapper that is put around it."""

    target: str
    """``module:attribute``, where it is defined."""
    method: str
    """Of :class:`~tracefp4.integrations.vllm.observe.Watch`."""


EXPERTS = (
    Hook(f"{_MOE}.routed_experts:RoutedExperts.forward_modular", "experts"),
    Hook(f"{_MOE}.routed_experts:RoutedExperts.forward_monolithic", "experts"),
)
"""What every path passes through."""
LOADED = Hook(f"{_MOE}.oracle.nvfp4:convert_to_nvfp4_moe_kernel_format", "loaded")
"""Where weights take their kernel's layout."""
_INPUT = (Hook(f"{_MOE}.utils:moe_kernel_quantize_input", "quantize_input"),)
_PER_TOKEN = (Hook(f"{_LAYERS}.quantization.utils.flashinfer_utils:quantize_nvfp4_per_token_input", "per_token"),)
_CUTLASS = (
    Hook("vllm._custom_ops:get_cutlass_moe_mm_data", "order"),
    Hook("vllm._custom_ops:scaled_fp4_experts_quant", "sorted_input"),
    Hook("vllm._custom_ops:silu_and_mul_scaled_fp4_experts_quant", "sorted_middle"),
)
_BATCHED = f"{_MOE}.experts.flashinfer_cutedsl_batched_moe"
_MASKED = (
    Hook(f"{_MOE}.prepare_finalize.deepep_ll:DeepEPLLPrepareAndFinalize.prepare_async", "dispatched"),
    Hook(f"{_BATCHED}:flashinfer_cutedsl_moe_masked", "masked"),
    Hook(f"{_BATCHED}:scaled_fp4_grouped_quantize", "masked_input"),
    Hook(f"{_BATCHED}:silu_and_mul_scaled_nvfp4_experts_quantize", "masked_middle"),
)


@dataclass(frozen=True, slots=True)
class Path:
    """One way in which vLLM computes routed experts in FP4."""

    name: str
    """Value of ``--moe-backend``, and what else selects it."""
    backend: str
    """Member of vLLM's ``NvFp4MoeBackend``; empty: another method."""
    hooks: tuple[Hook, ...]
    """Quantizers of the experts' input outside of a kernel; none: inside."""
    middle: State
    """What becomes of the input of the down projection."""
    note: str
    per_token: bool = False
    """Whether each token has a global scale of its own."""


PATHS: tuple[Path, ...] = (
    Path("emulation", "EMULATION", _INPUT, "expected, not run", "both inputs; one scalar global scale"),
    Path("cutlass", "VLLM_CUTLASS", _CUTLASS, "expected, not run", "rows sorted by expert, a scale for each"),
    Path(
        "flashinfer_cutedsl batched",
        "FLASHINFER_CUTEDSL_BATCHED",
        _MASKED,
        "expected, not run",
        "rows by expert behind DeepEP's low latency dispatch; on one rank",
    ),
    Path("flashinfer_trtllm", "FLASHINFER_TRTLLM", _INPUT, "fused away", "SwiGLU and its rounding inside the kernel"),
    Path(
        "flashinfer_trtllm, nvfp4_per_token",
        "FLASHINFER_TRTLLM",
        _PER_TOKEN,
        "fused away",
        "one FP32 scale a token",
        per_token=True,
    ),
    Path("flashinfer_cutedsl", "FLASHINFER_CUTEDSL", _INPUT, "fused away", "the rest inside the wrapper"),
    Path(
        "flashinfer_cutedsl, nvfp4_per_token",
        "FLASHINFER_CUTEDSL",
        _PER_TOKEN,
        "fused away",
        "one FP32 scale a token",
        per_token=True,
    ),
    Path("flashinfer_cutlass", "FLASHINFER_CUTLASS", _INPUT, "fused away", "scales in tiles; the rest inside"),
    Path("flashinfer_moe_ep_cutedsl", "FLASHINFER_MOE_EP_CUTEDSL", (), "fused away", "rounds at dispatch, and inside"),
    Path("deep_gemm mega", "", (), "fused away", "rounds at dispatch, and inside"),
    Path("marlin", "MARLIN", (), "not quantized", "W4A16: no activation is quantized; the default below Blackwell"),
)

HOOKS: tuple[Hook, ...] = tuple({hook.target: hook for path in PATHS for hook in path.hooks}.values())
"""Every quantizer, once."""


def native_lines() -> list[SiteLine]:
    """The table of vLLM's own paths."""
    lines = [line for path in PATHS for line in path_lines(path.name, bool(path.hooks), path.middle, path.note)]
    for kind in (Kind.K, Kind.V):
        note = "read from the cache's pages"
        if kind == Kind.V:
            note += "; scales that TRT-LLM's attention wants moved are put back (SM100)"
        lines.append(SiteLine(str(kind), CACHE, True, True, "expected, not run", note))
    return lines


def cache_type(layers: Mapping[int, Any]) -> str:
    """``--kv-cache-dtype`` of attention layers, the first one that is FP4 if they differ."""
    types = [str(layer.kv_cache_dtype) for layer in layers.values()]
    return next((name for name in types if name == DTYPE), types[0] if types else "")


def running_path(method: Any) -> str:
    """Name of the path that vLLM's quantization method of a layer takes; empty for one that is not in the table."""
    backend = getattr(getattr(method, "nvfp4_backend", None), "name", None)
    per_token = bool(getattr(method, "per_token_activation", False))
    fits = [path.name for path in PATHS if path.backend == backend and path.per_token == per_token]
    return fits[0] if fits else ""


def available() -> list[str]:
    """Targets of :data:`HOOKS` that can be imported here."""
    return [hook.target for hook in HOOKS if find(hook.target) is not None]


def observed(running: str, cache: str = DTYPE) -> list[SiteLine]:
    """The table of a process whose own kernels compute, on the path ``running`` and with a cache of type ``cache``."""
    bound = available()
    missing = {path.name for path in PATHS if any(hook.target not in bound for hook in path.hooks)}
    lines = observed_lines(native_lines(), running, missing)
    if cache == DTYPE:
        return lines
    state: State = "not bound" if cache.startswith(DTYPE) else "not quantized"
    path, note = f"--kv-cache-dtype {cache}", f"guidance needs --kv-cache-dtype {DTYPE}"
    return [SiteLine(x.site, path, False, False, state, note) if x.path == CACHE else x for x in lines]


def site_table(spec: Spec, plan: Plan | None, device: str, carried: str = "", *, paged: bool = False) -> list[SiteLine]:
    """What this process records in our own arithmetic.

    Args:
        spec: what is quantized.
        plan: what is recorded.
        device: of the model.
        carried: how rows leave the model's process, for people.
        paged: whether K and V lie in FP4 pages, instead of as rounded values with codes beside them.
    """
    planned = set() if plan is None else set(plan.kinds)
    lines = []
    for kind in (Kind.EXPERTS_IN, Kind.EXPERTS_MID, Kind.K, Kind.V):
        numerics = spec.for_kind(kind)
        if numerics is None:
            lines.append(SiteLine(str(kind), "emulation", False, False, "not quantized"))
            continue
        state = "recorded" if kind in planned else "not planned"
        run = state if device == "cpu" else "expected, not run"
        where = "" if kind in EXPERT_KINDS else "FP4 pages" if paged else "rounded values, codes beside them"
        note = "; ".join(part for part in (numerics.name, where, carried) if part)
        lines.append(SiteLine(str(kind), "emulation", True, True, run, note))
    return lines
