"""Stacked experts as the linear modules of a checkpoint: what formats for serving engines know.

A part of a packed weight is stacked as its parameter is, ``(E, N, ...)``, gate over up. A checkpoint names each
expert's projection as a module, ``...experts.3.gate_proj``, and a format says which parts such a module has. The way
from one to the other is transformers' own: a part has the axes of the parameter, so it is cut and named like it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from tracefp4.errors import ModelError

SUFFIX = ".weight"


def hub_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names, and in the pieces, of the checkpoint that transformers saves."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def linear_tensors(
    model: Any, parts: Mapping[str, Mapping[str, Tensor]], single: Container[str] = ()
) -> dict[str, Tensor]:
    """Parts of stacked weights as tensors of linear modules, ``<module>.<part>``.

    Args:
        model: with or without weights.
        parts: for each part of the format its tensors ``(E, N, ...)`` by parameter name.
        single: parts that are one number a module; theirs are ``(E, N, 1)`` with equal rows, and become ``(1,)``.

    Raises:
        ModelError: the model's checkpoint does not keep experts as linear modules.
    """
    found = {}
    for part, values in parts.items():
        # Two columns, for releases of transformers that drop every axis of size 1 on the way.
        wide = {name: t.expand(*t.shape[:2], 2) if part in single else t for name, t in values.items()}
        for name, tensor in hub_names(model, wide).items():
            if not name.endswith(SUFFIX) or tensor.ndim != 2:
                raise ModelError(f"the checkpoint of {type(model).__name__} keeps experts as {name!r}, not one by one")
            found[f"{name.removesuffix(SUFFIX)}.{part}"] = tensor[:1, 0] if part in single else tensor
    return found
