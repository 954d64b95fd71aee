"""Experts that SGLang keeps in NVFP4 itself (``modelopt_fp4``, ``nvfp4_online``, compressed-tensors), for the checksum.

What a layer's weights look like after loading depends on the backend::

    flashinfer_trtllm              [up, gate], rows of the two in turn, shuffled for the kernel's lanes; tiled scales
    flashinfer_cutlass             [up, gate]; tiled scales
    flashinfer_cutedsl             [up, gate], chunks of 64 rows in turn; tiled scales under six axes
    flashinfer_cutedsl, deepep     as the checkpoint has them; tiled scales

:func:`stored_experts` finds out which, from what SGLang left on the module. MegaMoE's and Marlin's own layouts are not
read back; a checksum over them is refused.
"""

from __future__ import annotations

from typing import Any, Literal

from tracefp4.errors import SyncError
from tracefp4.integrations.engines.layouts import PLAIN, Rows
from tracefp4.integrations.engines.stored import Scales, StoredWeight
from tracefp4.integrations.sglang.worker import layer_of

CHUNK = 64
"""Rows that CuteDSL takes from gate and up in turn."""

PARTS = {"gate_up_proj": "w13", "down_proj": "w2"}
"""The trainer's projection, and the prefix of SGLang's parameters."""


def stored_experts(module: Any) -> dict[str, StoredWeight]:
    """Both projections of a ``FusedMoE`` module by the trainer's names; empty if it does not keep FP4.

    Raises:
        SyncError: a layout that is not read back.
    """
    if getattr(module, "w13_weight_scale", None) is None:
        return {}
    gate_up, down, arranged, held = _arrangement(module)
    found = {}
    for projection, rows in (("gate_up_proj", gate_up), ("down_proj", down)):
        part = PARTS[projection]
        form, value = _global(module, part)
        codes, scales = getattr(module, f"{part}_weight"), getattr(module, f"{part}_{held}")
        found[projection] = StoredWeight(codes.detach(), scales.detach(), value.detach(), form, rows, arranged)
    return found


def _arrangement(module: Any) -> tuple[Rows, Rows, Scales, str]:
    """Rows of gate and up, rows of down, arrangement of the scales, and the name that they have."""
    method = getattr(module, "scheme", None) or module.quant_method
    refused = module.w13_weight.element_size() != 1 or getattr(module, "_mega_moe_weights_built", False)
    if not refused and _flag(method, "use_flashinfer_trtllm_weight_layout", "use_flashinfer_trtllm"):
        return Rows(up_first=True, chunk=1, shuffled=True), Rows(shuffled=True), "tiled", "weight_scale"
    up_first = _flag(method, "load_up_proj_weight_first")
    if not refused and getattr(module, "w13_blockscale_mma", None) is not None:
        return Rows(up_first=up_first, chunk=CHUNK), PLAIN, "matrix view", "blockscale_mma"
    if not refused and getattr(module, "w13_blockscale_swizzled", None) is not None:
        return Rows(up_first=up_first), PLAIN, "tiled", "blockscale_swizzled"
    if not refused and getattr(module, "w13_weight_global_scale", None) is not None:
        return Rows(up_first=up_first), PLAIN, "tiled", "weight_scale"
    raise SyncError(
        f"layer {layer_of(module)}: {type(method).__name__} keeps its weights in a layout that is not read back; the "
        "checksum needs one of the flashinfer backends"
    )


def _flag(method: Any, *names: str) -> bool:
    return any(bool(getattr(method, name, False)) for name in names)


def _global(module: Any, part: str) -> tuple[Literal["encode", "decode"], Any]:
    """compressed-tensors keeps what values are multiplied by, ModelOpt what products are."""
    value = getattr(module, f"{part}_weight_global_scale", None)
    return ("decode", getattr(module, f"{part}_weight_scale_2")) if value is None else ("encode", value)
