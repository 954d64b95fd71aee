"""Quantize, write, load, serve: the stored codes are the ones that generate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.errors import ConfigError, ModelError, SyncError
from tracefp4.export.posthoc import METHODS, quantize_experts
from tracefp4.export.run import QuantizeSettings, quantize
from tracefp4.formats.spec import get_spec
from tracefp4.models.loading import load_model
from tracefp4.models.packed import packed_weights
from tracefp4.models.packing import model_digest
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.embedded import EmbeddedEngine

SPEC = get_spec("nvfp4-w4a4-kv4")
TASK = """
policy = "tiny-moe"
[task]
kind = "reasoning_gym"
name = "chain_sum"
[sampling]
max_new_tokens = 4
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "task.toml").write_text(TASK, encoding="utf-8")
    return tmp_path / "task.toml"


def make(tmp_path: Path, method: str, task: Path, **more) -> tuple[Path, dict]:
    folder = tmp_path / method
    wanted = QuantizeSettings("tiny-moe", folder, method, config=task, prompts=8, device="cpu", **more)
    return folder, quantize(wanted)


@pytest.mark.parametrize("method", METHODS)
def test_folder_loads_and_the_engine_serves_its_codes(tmp_path, task, method):
    folder, found = make(tmp_path, method, task)
    assert found["method"] == method and len(found["rows"]) == 8
    loaded = load_model(folder)
    packed = packed_weights(folder)
    direct, _ = quantize_experts(load_model("tiny-moe").model, method if method != "hscale" else "nvfp4", SPEC.weights)
    assert packed.keys() == direct.keys()
    if method != "hscale":
        assert all(torch.equal(packed[n].codes, direct[n].codes) for n in packed)
    parameters = dict(loaded.model.named_parameters())
    for name, weight in packed.items():
        assert torch.equal(parameters[name].detach(), weight.dequantize().bfloat16())
    engine = EmbeddedEngine(load_model("tiny-moe").model, None, SPEC, max_tokens=512)
    engine.sync(parameters | packed, 1)
    assert all(torch.equal(engine._weights.packed(n).codes, packed[n].codes) for n in packed)
    (rollout,) = engine.generate([Request("a", (1, 2, 3), 1, SamplingParams(max_new_tokens=4))])
    assert len(rollout.response_ids) >= 1


def test_layers_left_in_bf16_are_written_as_they_are(tmp_path, task):
    folder, found = make(tmp_path, "nvfp4", task, spec="nvfp4-w4a4-kv4/b1")
    model, spec = load_model("tiny-moe").model, get_spec(found["spec"])
    packed, loaded = packed_weights(folder), dict(load_model(folder).model.named_parameters())
    assert spec.bf16_layers == 1 and len(found["rows"]) == len(packed) == 6
    assert not any(".layers.0." in name for name in packed)
    assert all(torch.equal(loaded[n], p) for n, p in model.named_parameters() if n not in packed)
    engine = EmbeddedEngine(load_model("tiny-moe").model, None, spec, max_tokens=512)
    expected = model_digest(model, engine.layout, spec.weights, first=1)
    assert engine.sync(loaded | packed, 1) == expected == engine.sync(dict(model.named_parameters()), 2)


def test_nvfp4_is_what_a_sync_of_the_weights_does(tmp_path, task):
    folder, _ = make(tmp_path, "nvfp4", task)
    model = load_model("tiny-moe").model
    engine = EmbeddedEngine(load_model("tiny-moe").model, None, SPEC, max_tokens=512)
    expected = model_digest(model, engine.layout, SPEC.weights)
    assert engine.sync(dict(model.named_parameters()) | packed_weights(folder), 1) == expected


def test_dequantized_weights_quantize_to_other_codes(tmp_path, task):
    """Why codes are stored: rounding the values of four over six to nearest again gives other values."""
    folder, _ = make(tmp_path, "4over6-mse", task)
    loaded, packed = load_model(folder), packed_weights(folder)
    again, _ = quantize_experts(loaded.model, "nvfp4", SPEC.weights)
    assert any(not torch.equal(again[n].dequantize(), packed[n].dequantize()) for n in packed)


def test_errors_are_ordered_as_the_methods_promise(tmp_path, task):
    errors = {m: make(tmp_path, m, task, calibrate=True)[1]["errors"] for m in ("nvfp4", "4over6-mse", "hscale")}
    plain = errors["nvfp4"]
    assert plain["error"] == plain["error_nearest"] and plain["scales_unchanged"] == 1.0
    assert errors["4over6-mse"]["error"] < plain["error"]
    assert errors["hscale"]["weighted"] < errors["4over6-mse"]["weighted"] < plain["weighted"]


def test_gpt_oss_keeps_its_layout(tmp_path):
    model = tiny_model("gpt_oss", vocab_size=288)
    packed, rows = quantize_experts(model, "4over6-mae", SPEC.weights)
    for name, weight in packed.items():
        parameter = dict(model.named_parameters())[name]
        assert weight.dequantize().transpose(1, 2).shape == parameter.shape
    assert all(0.05 < row.error < 0.12 for row in rows)


def test_what_is_refused(tmp_path, task):
    with pytest.raises(ConfigError, match="did you mean 'hscale'"):
        make(tmp_path, "h-scale", task)
    with pytest.raises(ConfigError, match="no NVFP4 weights"):
        make(tmp_path, "nvfp4", task, spec="mxfp4-w4a4-kv4")
    with pytest.raises(ConfigError, match="needs prompts"):
        quantize(QuantizeSettings("tiny-moe", tmp_path / "x", "hscale", device="cpu"))
    folder, _ = make(tmp_path, "nvfp4", task)
    with pytest.raises(ModelError, match="exists already"):
        make(tmp_path, "nvfp4", task)
    model = load_model("tiny-moe").model
    for spec in ("nvfp4-kv4", "mxfp4-w4a4-kv4"):
        engine = EmbeddedEngine(load_model("tiny-moe").model, None, get_spec(spec), max_tokens=512)
        with pytest.raises(SyncError, match="comes packed as"):
            engine.sync(dict(model.named_parameters()) | packed_weights(folder), 1)


def test_an_altered_folder_is_refused(tmp_path, task):
    folder, _ = make(tmp_path, "nvfp4", task)
    head = json.loads((folder / "tracefp4_packed.json").read_text())
    (folder / "tracefp4_packed.json").write_text(json.dumps(head | {"digest": "0" * 32}))
    with pytest.raises(ModelError, match="was altered"):
        load_model(folder)
    (folder / "tracefp4_packed.json").write_text(json.dumps(head | {"numerics_hash": "0" * 16}))
    with pytest.raises(ModelError, match="other arithmetic"):
        load_model(folder)
    (folder / "tracefp4_packed.json").write_text(json.dumps(head | {"format": 9}))
    with pytest.raises(ModelError, match="format 9"):
        load_model(folder)
    (folder / "tracefp4_packed.json").write_text(json.dumps(head))
    (folder / "experts.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(folder)
