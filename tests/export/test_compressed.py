"""Checkpoints in the format of compressed-tensors: what that library reads back is what the trainer computes with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tracefp4.errors import ConfigError, ModelError
from tracefp4.export.compressed import write_compressed
from tracefp4.export.posthoc import quantize_experts
from tracefp4.export.run import QuantizeSettings, quantize
from tracefp4.formats.spec import get_spec
from tracefp4.models.loading import load_model

library = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")


def read_back(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], object]:
    """Tensors of the file, dequantized weights by module as the library computes them in float32, and its settings."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    tensors = load_file(folder / "model.safetensors")
    section = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    settings = QuantizationConfig.model_validate(section)
    scheme = settings.config_groups["group_0"]
    weights = {}
    for name, packed in tensors.items():
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            rows, half = packed.shape
            weights[module] = dequantize(
                x_q=unpack_fp4_from_uint8(packed, rows, 2 * half, dtype=torch.float32),
                scale=tensors[f"{module}.weight_scale"].float(),
                args=scheme.weights,
                global_scale=tensors[f"{module}.weight_global_scale"],
                dtype=torch.float32,
            )
    return tensors, weights, settings


@pytest.mark.parametrize("numerics", ["nvfp4-te", "nvfp4-pow2"])
@pytest.mark.parametrize("name", ["tiny-moe", "tiny:qwen3_moe"])
def test_the_library_reads_back_the_weights_of_the_trainer(tmp_path: Path, name: str, numerics: str) -> None:
    loaded = load_model(name)
    spec = get_spec("nvfp4-w4a4-kv4", numerics)
    assert spec.weights is not None
    packed, _ = quantize_experts(loaded.model, "nvfp4", spec.weights)
    tensors, weights, _ = read_back(write_compressed(loaded, packed, tmp_path / "out"))
    seen = 0
    for parameter, weight in packed.items():
        path, _, projection = parameter.rpartition(".")
        values = weight.dequantize()
        for expert in range(len(values)):
            parts = {"down_proj": values[expert]}
            if projection == "gate_up_proj":
                gate, up = values[expert].chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, expected in parts.items():
                found = weights[f"{path}.{expert}.{part}"]
                # The library divides the block scale by the global one, we multiply by its reciprocal: with powers
                # of two that is the same, else the last bit may differ.
                torch.testing.assert_close(found, expected, rtol=0 if numerics == "nvfp4-pow2" else 3e-7, atol=0)
                seen += 1
    assert seen == len(weights) > 0
    # What is not quantized is there as it was.
    plain = {n: p for n, p in loaded.model.named_parameters() if n not in packed}
    assert all(torch.equal(tensors[n], p) for n, p in plain.items() if n in tensors)
    assert len(tensors) == len(plain) + 3 * seen


@pytest.mark.parametrize("first", [0, 1])
def test_modules_that_are_not_quantized_are_ignored(tmp_path: Path, first: int) -> None:
    from compressed_tensors.utils import match_name

    loaded = load_model("tiny-moe")
    packed, _ = quantize_experts(loaded.model, "nvfp4", get_spec("nvfp4-w4a4-kv4").weights, first=first)
    tensors, weights, settings = read_back(write_compressed(loaded, packed, tmp_path / "out"))
    ignored = settings.ignore
    assert not any(match_name(module, name) for module in weights for name in ignored)
    linear = {n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight") and t.ndim == 2}
    assert linear <= set(ignored)
    assert any(name.endswith("lm_head") for name in ignored)
    assert any(".layers.0.mlp.experts." in name for name in ignored) == (first == 1)


def test_a_command_writes_it_and_calibration_adds_input_scales(tmp_path: Path) -> None:
    task = tmp_path / "task.toml"
    task.write_text(
        'policy = "tiny-moe"\n[task]\nkind = "reasoning_gym"\nname = "chain_sum"\n[sampling]\nmax_new_tokens = 4\n',
        encoding="utf-8",
    )
    plain = QuantizeSettings("tiny-moe", tmp_path / "a16", layout="compressed-tensors", device="cpu")
    assert quantize(plain)["activations"] == "BF16"
    tensors, _, settings = read_back(tmp_path / "a16")
    assert settings.config_groups["group_0"].input_activations is None
    assert not any("input_global_scale" in name for name in tensors)
    wanted = QuantizeSettings(
        "tiny-moe", tmp_path / "a4", config=task, calibrate=True, layout="compressed-tensors", prompts=4, device="cpu"
    )
    assert quantize(wanted)["activations"] == "NVFP4"
    tensors, weights, settings = read_back(tmp_path / "a4")
    assert str(settings.config_groups["group_0"].input_activations.dynamic) == "local"
    scales = [tensors[f"{module}.input_global_scale"] for module in weights]
    assert all(scale.shape == (1,) and float(scale) > 0 for scale in scales)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    loaded = load_model("tiny-moe")
    mx = get_spec("mxfp4-w4a4-kv4", "mxfp4-ocp").weights
    assert mx is not None
    packed, _ = quantize_experts(loaded.model, "nvfp4", mx)
    with pytest.raises(ConfigError, match="holds NVFP4"):
        write_compressed(loaded, packed, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ModelError, match="exists already"):
        write_compressed(loaded, {}, tmp_path / "full")
    with pytest.raises(ConfigError, match="did you mean 'compressed-tensors'"):
        quantize(QuantizeSettings("tiny-moe", tmp_path / "x", layout="compressed_tensors", device="cpu"))
