"""A model whose expert weights are stored as FP4 codes and scales.

Post-hoc quantization chooses codes that rounding to nearest would not give, so they cannot be stored as bfloat16
weights and quantized again on arrival. A packed folder is the folder of a transformers model in which the expert
projections are replaced:

    config.json, tokenizer files     as transformers writes them
    model.safetensors                every parameter that is not an expert projection, by name
    experts.safetensors              ``<name>.codes`` uint8 (two a byte), ``<name>.scales`` uint8, ``<name>.global``
    tracefp4_packed.json             format, method, spec, numerics and its hash, checksum, what was measured

It loads as an ordinary model whose expert parameters hold the dequantized values, rounded to the model's dtype. The
packed weights themselves are read with :func:`packed_weights`; an engine that is synced with them serves exactly the
stored codes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import FormatError, ModelError
from tracefp4.formats.spec import get_spec
from tracefp4.models.layout import describe
from tracefp4.models.packing import PackedWeight, digest, expert_weights
from tracefp4.models.weight_file import from_parts, to_parts

PACKED_FILE = "tracefp4_packed.json"
"""Marks a packed folder."""
_FORMAT = 1


def write_packed(
    model: nn.Module,
    packed: Mapping[str, PackedWeight],
    folder: Path,
    *,
    spec: str,
    numerics: str,
    facts: dict[str, Any],
) -> None:
    """Write the weights of a packed folder; configuration and tokenizer are written by the caller.

    Args:
        model: whose other parameters are stored as they are.
        packed: codes and scales of every expert projection, by parameter name.
        folder: an existing folder.
        spec: deployment for which the weights were quantized, and
        numerics: its preset; together they give the numerics again.
        facts: JSON data that is kept beside: method, errors, calibration.
    """
    from safetensors.torch import save_file

    others = {n: p.detach().contiguous().cpu() for n, p in model.named_parameters() if n not in packed}
    save_file(others, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(to_parts(packed), folder / "experts.safetensors")
    head = {"format": _FORMAT, "spec": spec, "numerics": numerics, "weights": sorted(packed)}
    head |= {"numerics_hash": next(iter(packed.values())).numerics.hash, "digest": packed_digest(packed)}
    (folder / PACKED_FILE).write_text(json.dumps(head | facts, indent=1) + "\n", encoding="utf-8")


def read_packed(folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Read a packed folder.

    Returns:
        The model with dequantized expert weights, and what is written beside them.

    Raises:
        ModelError: a file is missing, altered or of another version; the message says which.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    head, packed = _head(folder), packed_weights(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"packed model {folder}: config.json cannot be read: {error}") from error
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _fill(model, _tensors(folder / "model.safetensors"), packed, folder)
    return model.eval(), head


def packed_weights(folder: Path) -> dict[str, PackedWeight]:
    """Codes and scales of the expert projections of a packed folder, by parameter name, on the CPU.

    Raises:
        ModelError: see :func:`read_packed`.
    """
    head, experts = _head(folder), _tensors(folder / "experts.safetensors")
    try:
        return _packed(folder, head, experts)
    except (KeyError, FormatError) as error:
        raise ModelError(f"packed model {folder} is incomplete or of unknown numerics: {error}") from error


def _head(folder: Path) -> dict[str, Any]:
    try:
        head = json.loads((folder / PACKED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"packed model {folder}: {PACKED_FILE} cannot be read: {error}") from error
    if head.get("format") != _FORMAT:
        raise ModelError(f"packed model {folder} has format {head.get('format')!r}, this version reads {_FORMAT}")
    return head


def _tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def packed_digest(packed: Mapping[str, PackedWeight]) -> str:
    """Checksum of packed weights, XXH3-128, 32 hex characters."""
    return digest({name: tuple(weight.parts()) for name, weight in packed.items()})


def _packed(folder: Path, head: dict[str, Any], experts: Mapping[str, Tensor]) -> dict[str, PackedWeight]:
    numerics = get_spec(head["spec"], head["numerics"]).weights
    if numerics is None or numerics.hash != head["numerics_hash"]:
        raise ModelError(
            f"packed model {folder} was written with other arithmetic than {head['numerics']!r} here: quantize again"
        )
    packed = from_parts(experts, dict.fromkeys(head["weights"], numerics))
    if packed_digest(packed) != head["digest"]:
        raise ModelError(f"packed model {folder}: experts.safetensors was altered, its checksum differs")
    return packed


@torch.no_grad()
def _fill(model: nn.Module, others: Mapping[str, Tensor], packed: Mapping[str, PackedWeight], folder: Path) -> None:
    transposed = {name: flag for name, _, flag in expert_weights(model, describe(model))}
    parameters = dict(model.named_parameters())
    different = sorted(parameters.keys() ^ (others.keys() | packed.keys()))
    if different:
        raise ModelError(f"packed model {folder} does not fit its config.json: see parameter {different[0]!r}")
    for name, parameter in parameters.items():
        if name not in packed:
            values = others[name]
        else:
            values = packed[name].dequantize()
            values = values.transpose(1, 2) if transposed[name] else values
        if values.shape != parameter.shape:
            raise ModelError(f"packed model {folder}: {name!r} has shape {tuple(values.shape)}, its config another")
        parameter.copy_(values)
