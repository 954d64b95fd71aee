"""Packed experts for SGLang's own NVFP4 kernels: through its loader, as tensors of a ModelOpt checkpoint.

Under ``--quantization modelopt_fp4`` SGLang's loader takes, for each expert's projection,

::

    weight          uint8 (N, K / 2), two codes a byte, low nibble first
    weight_scale    E4M3 (N, K / 16)
    weight_scale_2  float32, the decode scale

and its post-processing at the end of a weight update moves rows and tiles scales for the kernel, in place. So nothing
here knows a kernel's layout. Scales of the inputs are not weights, and stay as they were. The checksum undoes the
layout (:mod:`tracefp4.integrations.sglang.stored`) and proves that codes and scales arrived.

Read in the source of SGLang 0.5.23, and tested with its loader; not run on Blackwell.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tracefp4.errors import SyncError
from tracefp4.export.linear import linear_tensors
from tracefp4.integrations.engines.weights import Names
from tracefp4.models.packing import PackedWeight

METHOD = "modelopt_fp4"
"""SGLang's quantization method that takes packed weights."""

_SCALES, _GLOBAL = "weight_scale", "weight_scale_2"


def modelopt_tensors(
    names: Names, state: Mapping[str, Tensor | PackedWeight], quantization: str | None
) -> dict[str, Tensor]:
    """What came packed, as tensors of a ModelOpt checkpoint; empty if nothing did.

    Args:
        names: of the model.
        state: what came; see :meth:`Names.check`.
        quantization: SGLang's method.

    Raises:
        SyncError: another method, or numerics that ModelOpt's checkpoints do not hold.
    """
    packed = {name: weight for name, weight in state.items() if isinstance(weight, PackedWeight)}
    parts: dict[str, dict[str, Tensor]] = {"weight": {}, _SCALES: {}, _GLOBAL: {}}
    for name, weight in packed.items():
        scale, numerics = weight.global_scale, weight.numerics
        if quantization != METHOD:
            raise SyncError(
                f"{name!r} comes packed, but SGLang's {quantization!r} takes no packed experts after its start: use "
                f"--quantization {METHOD}, or send them in bfloat16 to 'nvfp4_online'"
            )
        if scale is None or numerics.global_form != "decode" or numerics.scale_format != "e4m3":
            raise SyncError(
                f"{name!r} comes packed as {numerics.name}, ModelOpt's checkpoints hold E4M3 block scales and a decode "
                "scale; deploy a spec of nvfp4-modelopt"
            )
        parts["weight"][name], parts[_SCALES][name] = weight.codes, weight.scales.view(torch.float8_e4m3fn)
        parts[_GLOBAL][name] = scale.expand(*weight.shape[:2], 1)
    return linear_tensors(names.model, parts, (_GLOBAL,))
