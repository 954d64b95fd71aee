"""Experts that vLLM keeps in NVFP4 itself (ModelOpt, compressed-tensors, online), for the checksum.

What a layer's weights look like after loading depends on the backend::

    emulation                                          as the checkpoint has them
    cutlass, flashinfer_cutedsl batched                tiled scales
    flashinfer_cutlass                                 [up, gate]; tiled scales
    flashinfer_cutedsl                                 [up, gate], padded, chunks of 64 rows in turn; tiled scales
    flashinfer_trtllm                                  [up, gate], padded, rows in turn, shuffled; tiled scales

Some kernels multiply the global scale of the weights with that of the inputs, in place, and from the product it cannot
be had again. So :func:`keep_globals` notes it on the way into the kernel's layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tracefp4.errors import SyncError
from tracefp4.integrations.engines.layouts import PLAIN, Rows
from tracefp4.integrations.engines.stored import Scales, StoredWeight

CHUNK = 64
"""Rows that CuteDSL takes from gate and up in turn."""

_UP = Rows(up_first=True)
_LAYOUTS: dict[str, tuple[Rows, Rows, Scales]] = {
    "EMULATION": (PLAIN, PLAIN, "linear"),
    "VLLM_CUTLASS": (PLAIN, PLAIN, "tiled"),
    "FLASHINFER_CUTEDSL_BATCHED": (PLAIN, PLAIN, "tiled"),
    "FLASHINFER_CUTLASS": (_UP, PLAIN, "tiled"),
    "FLASHINFER_CUTEDSL": (Rows(up_first=True, chunk=CHUNK), PLAIN, "tiled"),
    "FLASHINFER_TRTLLM": (Rows(up_first=True, chunk=1, shuffled=True), Rows(shuffled=True), "tiled"),
}
"""Rows of gate and up, rows of down, and scales, by member of vLLM's ``NvFp4MoeBackend``."""

KEPT = "tracefp4_globals"
"""Attribute of a layer with its two global scales as they were loaded."""


def keep_globals(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``convert_to_nvfp4_moe_kernel_format(nvfp4_backend, layer, ..., w13_scale_2, ..., w2_scale_2, ...)``."""
    told = inspect.signature(original).bind(*args, **kwargs).arguments
    kept = {part: told[f"{part}_scale_2"].detach().clone() for part in ("w13", "w2")}
    setattr(told["layer"], KEPT, kept)
    return original(*args, **kwargs)


def stored_experts(module: Any, method: Any) -> dict[str, StoredWeight]:
    """Both projections of a ``RoutedExperts`` module by the trainer's names; empty if it does not keep NVFP4.

    Raises:
        SyncError: a layout that is not read back, or weights that were loaded before the plugin was there.
    """
    backend = getattr(getattr(method, "nvfp4_backend", None), "name", None)
    if backend is None:
        return {}
    if backend not in _LAYOUTS:
        known = ", ".join(name.lower() for name in _LAYOUTS)
        raise SyncError(f"{module.layer_name}: the layout of {backend.lower()} is not read back; known are {known}")
    gate_up, down, arranged = _LAYOUTS[backend]
    found = {}
    for projection, part, rows in (("gate_up_proj", "w13", gate_up), ("down_proj", "w2", down)):
        encode = getattr(module, f"{part}_weight_global_scale", None)
        scale = getattr(module, KEPT, {}).get(part) if encode is None else encode.detach()
        if scale is None:
            raise SyncError(f"{module.layer_name}: its global scales were not noted when it was loaded")
        found[projection] = StoredWeight(
            getattr(module, f"{part}_weight").detach(),
            getattr(module, f"{part}_weight_scale").detach(),
            scale,
            "decode" if encode is None else "encode",
            rows,
            arranged,
        )
    return found
