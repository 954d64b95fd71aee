"""Models by name, folders, and the errors of what cannot be loaded."""

from __future__ import annotations

import json
import logging
import pickle

import pytest
import torch

from tracefp4.errors import ModelError
from tracefp4.models import loading
from tracefp4.models.directory import CACHE_VARIABLE, SOURCE_FILE, LoadedModel, cached, complete_folder
from tracefp4.models.layout import describe
from tracefp4.models.loading import NAMES, cache_dir, load_model, save_model
from tracefp4.models.quickstart import MAX_LENGTH, tiny_moe
from tracefp4.models.tiny import FAMILIES
from tracefp4.models.tokenizer import VOCAB_SIZE


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def offline(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", [f"tiny:{family}" for family in FAMILIES])
def test_tiny_models_come_with_a_tokenizer_of_their_size(name):
    model, tokenizer, source = load_model(name)
    assert model.config.vocab_size == len(tokenizer) == VOCAB_SIZE
    assert not model.training and model.dtype == torch.bfloat16
    assert source["name"] == name and "untrained" in source["notes"][0]
    assert source["parameters"] == sum(p.numel() for p in model.parameters()) and source["dtype"] == "bfloat16"
    tokens = torch.tensor([tokenizer("1 + 1 =").input_ids])
    assert model(tokens, use_cache=False).logits.shape == (1, 7, VOCAB_SIZE)


def test_seed_and_dtype_are_the_callers():
    first = load_model("tiny-moe", dtype=torch.float32, seed=1)
    assert first.model.dtype == torch.float32
    assert same(weights(first.model), weights(load_model("tiny-moe", dtype=torch.float32, seed=1).model))
    assert not same(weights(first.model), weights(load_model("tiny-moe", dtype=torch.float32, seed=2).model))


def test_quickstart_model_is_small_and_has_what_fp4_needs():
    layout = describe(tiny_moe())
    assert (layout.num_layers, layout.num_experts, layout.top_k, layout.head_dim) == (4, 8, 2, 32)
    assert layout.hidden % 32 == 0 and layout.intermediate % 32 == 0
    loaded = load_model("tiny-moe")
    assert loaded.source["parameters"] < 2_000_000
    assert loaded.tokenizer.model_max_length == loaded.model.config.max_position_embeddings == MAX_LENGTH


def test_saved_model_loads_equal_with_its_source(tmp_path):
    loaded = load_model("tiny:mixtral")
    loaded.source["notes"].append("A note with umlauts: äöü.")
    folder = save_model(loaded, tmp_path / "new" / "model")
    again = load_model(folder)
    assert same(weights(loaded.model), weights(again.model))
    assert again.source == loaded.source and again.model.config.model_type == "mixtral"
    assert again.tokenizer("a  1\n2").input_ids == loaded.tokenizer("a  1\n2").input_ids
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert load_model(folder, dtype=torch.float32).model.dtype == torch.float32


def test_folder_of_save_pretrained_needs_no_source_note(tmp_path):
    loaded = load_model("tiny:qwen3_moe")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load_model(str(tmp_path))
    assert same(weights(loaded.model), weights(again.model))
    assert again.source["name"] == str(tmp_path) and again.source["notes"] == []


def test_nothing_is_printed(tmp_path, capfd):
    folder = save_model(load_model("tiny:olmoe"), tmp_path / "m")
    load_model(folder)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert logging.root.manager.disable == logging.NOTSET


def test_save_refuses_a_folder_with_content_and_takes_an_empty_one(tmp_path):
    loaded = load_model("tiny:mixtral")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(ModelError, match="full exists already"):
        save_model(loaded, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    assert load_model(save_model(loaded, tmp_path / "empty")).source["name"] == "tiny:mixtral"


def test_a_folder_that_fails_half_way_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), complete_folder(tmp_path / "m") as working:
        (working / "config.json").write_text("{}")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_the_first_wins(tmp_path):
    with complete_folder(tmp_path / "m") as slow:
        (slow / "who").write_text("slow")
        with complete_folder(tmp_path / "m") as fast:
            (fast / "who").write_text("fast")
    assert (tmp_path / "m" / "who").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_two_builders_of_a_cached_model_share_the_first_one(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    first = []

    def slow():
        first.append(cached("m", lambda: load_model("tiny:mixtral", seed=1), torch.bfloat16))
        return load_model("tiny:mixtral", seed=2)

    second = cached("m", slow, torch.bfloat16)
    assert same(weights(first[0].model), weights(second.model)) and first[0].source == second.source
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_who_comes_second_checks_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))

    def build():
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "foreign").write_text("")
        return load_model("tiny:mixtral")

    with pytest.raises(ModelError, match="no model folder"):
        cached("m", build, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-moe", "did you mean 'smollm2-moe'"),
        ("tiny:qwen3moe", "did you mean 'tiny:qwen3_moe'"),
        ("tiny-mo", "did you mean 'tiny-moe'"),
        ("gpt2", "OWNER/NAME"),
        ("./nowhere", "no folder './nowhere'"),
        ("/nowhere/at/all", "no folder '/nowhere/at/all'"),
        ("smollm2-moe-e4k9", "route to 9 of 4"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(name, message, monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(ModelError, match=message):
        load_model(name)
    assert len(NAMES) == len(set(NAMES))


def test_hub_without_a_network_is_one_sentence(offline, capfd):
    with pytest.raises(ModelError, match="'nobody-here/no-such-model' cannot be loaded") as caught:
        load_model("nobody-here/no-such-model@main")
    assert "without a network" in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_names_with_a_revision_are_parsed(monkeypatch):
    seen = {}

    def record(name, dtype, **options):
        seen.update(name=name, **options)
        return load_model("tiny:mixtral")

    monkeypatch.setattr(loading, "read_pretrained", record)
    load_model("owner/name.with-1.5B@refs/pr/1")
    assert seen == {"name": "owner/name.with-1.5B", "revision": "refs/pr/1"}


def edited(tmp_path, **changes):
    folder = save_model(load_model("tiny:mixtral"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_code_in_a_folder_does_not_run(tmp_path):
    folder = edited(tmp_path, model_type="other", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_not_opened(tmp_path):
    class Canary:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    folder = edited(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary()))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_truncated_weights_are_refused(tmp_path):
    folder = edited(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder)


def test_missing_weights_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = edited(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load_model(folder)


def test_quantized_checkpoints_are_refused(tmp_path):
    folder = edited(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match=r"stored quantized \(fp8\)"):
        load_model(folder)


def test_damaged_source_notes_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path)
    folder = edited(tmp_path)
    (folder / SOURCE_FILE).write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_model(folder)


def test_cache_folder_follows_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "a" / "b"))
    assert cache_dir() == tmp_path / "a" / "b" and cache_dir().is_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ModelError, match=CACHE_VARIABLE):
        cache_dir()


def test_loaded_model_unpacks_into_three():
    assert LoadedModel._fields == ("model", "tokenizer", "source")


def test_mxfp4_experts_are_dequantized_exactly(tmp_path):
    from safetensors.torch import load_file, save_file

    from tracefp4.formats import e2m1

    loaded = load_model("tiny:gpt_oss", dtype=torch.float32)
    folder = save_model(loaded, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, contraction, rows = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, rows, contraction // 32, 32), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, rows, contraction // 32), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = e2m1.pack(codes), scales
        values = e2m1.decode(codes) * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = values.flatten(2).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    again = load_model(folder)
    assert "MXFP4" in again.source["notes"][-1]
    for name, values in expected.items():
        assert torch.equal(again.model.get_parameter(name).float(), values), name
    assert len(expected) == 2 * again.model.config.num_hidden_layers
