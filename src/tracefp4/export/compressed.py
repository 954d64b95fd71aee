"""An NVFP4 checkpoint in the format of compressed-tensors, which vLLM and SGLang load without this package.

That format knows linear modules, so each expert's projection is written as one, under the name that the model has on
the hub::

    ...experts.3.gate_proj.weight_packed        uint8 (N, K / 2), two codes a byte, low nibble first
    ...experts.3.gate_proj.weight_scale         E4M3 (N, K / 16)
    ...experts.3.gate_proj.weight_global_scale  float32 (1,), the encode scale: a value is code x scale / global scale
    ...experts.3.gate_proj.input_global_scale   float32 (1,), with quantized activations

Everything else is written as transformers saves it, and named in ``ignore``. Codes and scales are the ones that the
trainer and our engines compute with, byte for byte; gate and up of an expert share their global scale, which is what
fused kernels ask for.

With quantized activations (W4A4) that format wants a constant global scale for the inputs of each module, made from the
largest value that calibration saw, where ours follows each token. So the weights are equal, and the activations are
rounded a little differently from how the policy was trained. Without calibration the checkpoint is W4A16. A quantized
KV cache is a setting of the engine there and not in the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import ConfigError, ModelError
from tracefp4.export.linear import SUFFIX, hub_names, linear_tensors
from tracefp4.formats import e2m1, e4m3
from tracefp4.models.directory import LoadedModel, claim, complete_folder, quiet
from tracefp4.models.packing import PackedWeight

FORMAT = "nvfp4-pack-quantized"
"""Name of the layout in the checkpoint's configuration."""

_SINGLE = ("weight_global_scale", "input_global_scale")


def write_compressed(
    loaded: LoadedModel,
    packed: Mapping[str, PackedWeight],
    directory: str | Path,
    peaks: Mapping[str, float] | None = None,
) -> Path:
    """Write the checkpoint.

    Args:
        loaded: model and tokenizer.
        packed: codes and scales of every expert projection, by parameter name.
        directory: must not exist yet, or be empty.
        peaks: the largest input of every expert projection, by parameter name; ``None`` leaves activations in BF16.

    Raises:
        ConfigError: the weights are not NVFP4 with a global scale.
        ModelError: the folder has content, or the model's checkpoint does not keep experts as linear modules.
    """
    from safetensors.torch import save_file

    path = Path(directory).expanduser().absolute()
    claim(path)
    tensors, ignored = _tensors(loaded.model, packed, peaks)
    try:
        with complete_folder(path) as working, quiet():
            loaded.model.config.save_pretrained(working)
            loaded.tokenizer.save_pretrained(working)
            save_file(tensors, working / "model.safetensors", metadata={"format": "pt"})
            file = working / "config.json"
            config = json.loads(file.read_text(encoding="utf-8"))
            config["quantization_config"] = quantization_config(ignored, activations=peaks is not None)
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelError(f"the checkpoint cannot be written to {path}: {error}") from error
    return path


def quantization_config(ignored: list[str], *, activations: bool) -> dict[str, Any]:
    """The section ``quantization_config`` of ``config.json``.

    Args:
        ignored: modules that are not quantized.
        activations: whether inputs of the others are (W4A4), or not (W4A16).
    """
    four = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    four["scale_dtype"] = "torch.float8_e4m3fn"
    group = {
        "targets": ["Linear"],
        "weights": four | {"dynamic": False},
        "input_activations": four | {"dynamic": "local"} if activations else None,
        "output_activations": None,
        "format": FORMAT,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def _tensors(
    model: Any, packed: Mapping[str, PackedWeight], peaks: Mapping[str, float] | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Everything in the file, and the modules that are not quantized."""
    plain = {n: p.detach().cpu() for n, p in model.named_parameters() if n not in packed}
    found = {name: tensor.contiguous().clone() for name, tensor in hub_names(model, plain).items()}
    ignored = sorted(
        name.removesuffix(SUFFIX) for name, tensor in found.items() if name.endswith(SUFFIX) and tensor.ndim == 2
    )
    embeddings: Any = model.get_output_embeddings()
    if embeddings is not None and model.config.tie_word_embeddings:
        ignored.append(next(n for n, m in model.named_modules() if m is embeddings))
    for name, tensor in linear_tensors(model, _parts(packed, peaks), _SINGLE).items():
        dtype = torch.float8_e4m3fn if name.endswith(".weight_scale") else tensor.dtype
        found[name] = tensor.contiguous().view(dtype).clone()
    return found, ignored


def _parts(packed: Mapping[str, PackedWeight], peaks: Mapping[str, float] | None) -> dict[str, dict[str, Tensor]]:
    """Each part of the format, stacked as the parameters are: ``(E, N, ...)`` by parameter name."""
    out: dict[str, dict[str, Tensor]] = {"weight_packed": {}, "weight_scale": {}, "weight_global_scale": {}}
    if peaks is not None:
        out["input_global_scale"] = {}
    for name, weight in packed.items():
        if weight.global_scale is None or weight.numerics.scale_format != "e4m3":
            raise ConfigError(f"{name!r} is {weight.numerics.name}: this checkpoint holds NVFP4 with a global scale")
        rows = weight.codes.shape[:2]
        scale = weight.global_scale if weight.numerics.global_form == "encode" else weight.global_scale.reciprocal()
        out["weight_packed"][name], out["weight_scale"][name] = weight.codes, weight.scales
        out["weight_global_scale"][name] = scale.expand(*rows, 1)
        if peaks is not None:
            wide = e4m3.MAX * e2m1.MAGNITUDES[-1] / max(peaks[name], torch.finfo(torch.float32).tiny)
            out["input_global_scale"][name] = torch.full((*rows, 1), wide, dtype=torch.float32)
    return out
