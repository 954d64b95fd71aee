"""Weights on their way to an engine: what is written is read again, and a file that is not whole is refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tracefp4.errors import FormatError
from tracefp4.formats.spec import get_spec
from tracefp4.models.layout import describe
from tracefp4.models.packing import PackedState, PackedWeight, model_digest, pack_weight
from tracefp4.models.tiny import tiny_model
from tracefp4.models.weight_file import read_weights, write_weights

NUMERICS = [
    *(get_spec("nvfp4-w4a4", name).weights for name in ("nvfp4-te", "nvfp4-pow2", "nvfp4-modelopt", "nvfp4-ct")),
    get_spec("mxfp4-w4a4-kv4").weights,
]


def packed(experts=2, out=4, width=64, numerics=NUMERICS[0], seed=0):
    generator = torch.Generator().manual_seed(seed)
    return pack_weight(torch.randn(experts, out, width, generator=generator).bfloat16(), numerics)


def same(left, right):
    return (
        isinstance(right, PackedWeight)
        and left.numerics == right.numerics
        and all(torch.equal(a, b) for a, b in zip(left.parts(), right.parts(), strict=True))
    )


@settings(max_examples=40, deadline=None)
@given(
    experts=st.integers(1, 3),
    out=st.integers(1, 5),
    blocks=st.integers(1, 3),
    choice=st.integers(0, len(NUMERICS) - 1),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 9),
)
def test_what_is_written_is_read_again_bit_for_bit(tmp_path_factory, experts, out, blocks, choice, dtype, seed):
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    a = packed(experts, out, 32 * blocks, NUMERICS[choice], seed)
    b = packed(out, experts, 64, NUMERICS[0], seed + 1)
    plain = torch.randn(3, 5).to(dtype).t()[1:]
    nbytes = write_weights(path, {"x.experts.gate_up_proj": a, "x.norm": plain, "down": b})
    assert nbytes == a.nbytes + b.nbytes + plain.nbytes
    found = read_weights(path)
    assert found.keys() == {"x.experts.gate_up_proj", "x.norm", "down"}
    assert same(a, found["x.experts.gate_up_proj"]) and same(b, found["down"])
    assert found["x.norm"].dtype is dtype and torch.equal(found["x.norm"], plain)


def altered(tmp_path, change):
    """The path of a file whose tensors, and description of packed ones, were changed by hand."""
    path = tmp_path / "w.safetensors"
    write_weights(path, {"a.proj": packed(), "b": torch.zeros(2)})
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        (key, told), *_ = file.metadata().items()
    head = json.loads(told)
    change(tensors, head)
    save_file(tensors, path, metadata={key: json.dumps(head)})
    return path


def renumber(head, **choices):
    (key, known), *_ = head["numerics"].items()
    head["numerics"][key] = known | choices


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t, h: t.pop("a.proj.codes"), "has no part 'a.proj.codes'"),
        (lambda t, h: t.pop("a.proj.scales"), "has no part 'a.proj.scales'"),
        (lambda t, h: t.pop("a.proj.global"), "'a.proj.global' is nothing, .* must be float32"),
        (
            lambda t, h: t.update({"a.proj.scales": t["a.proj.scales"][:, :, :1].clone()}),
            r"'a.proj.scales' is uint8 \(2, 4, 1\)",
        ),
        (lambda t, h: t.update({"a.proj.codes": t["a.proj.codes"][:1]}), "'a.proj.scales' is uint8"),
        (lambda t, h: t.update({"a.proj.codes": t["a.proj.codes"].int()}), "'a.proj.codes' is int32"),
        (lambda t, h: t.update({"a.proj.codes": t["a.proj.codes"][0]}), "'a.proj.codes' has shape"),
        (lambda t, h: t.update({"a.proj.global": t["a.proj.global"].double()}), "'a.proj.global' is float64"),
        (lambda t, h: h["weights"]["a.proj"][0].__setitem__(2, 128), "'a.proj' has codes of shape"),
        (lambda t, h: h["weights"].update({"c": h["weights"]["a.proj"]}), "has no part 'c.codes'"),
        (lambda t, h: renumber(h, scale_rule="divide"), "whose hash is not"),
        (lambda t, h: renumber(h, surprise=1), "words of another release"),
        (lambda t, h: h["weights"].update({"a.proj": [[2, 4], "x"]}), "words of another release"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_by_name(tmp_path, change, sentence):
    with pytest.raises(FormatError, match=sentence):
        read_weights(altered(tmp_path, change))


def test_other_files_and_names_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(FormatError, match="cannot be read"):
        read_weights(path)
    path.write_bytes(b"not weights")
    with pytest.raises(FormatError, match="cannot be read"):
        read_weights(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(FormatError, match="not written for a sync"):
        read_weights(path)
    with pytest.raises(FormatError, match="a part of a packed weight"):
        write_weights(path, {"a": packed(), "a.codes": torch.zeros(1)})
    broken = packed()
    broken.scales = broken.scales[:1]
    with pytest.raises(FormatError, match="'a.scales' is uint8"):
        write_weights(path, {"a": broken})


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_packed_state_is_what_the_checksum_is_taken_over(family):
    model = tiny_model(family)
    layout, parameters = describe(model), dict(model.named_parameters())
    state = PackedState(model, layout, NUMERICS[0], parameters)
    assert list(state) == list(parameters) and len(state) == len(parameters)
    experts = {name for name, weight in state.items() if isinstance(weight, PackedWeight)}
    assert len(experts) == 2 * len(layout.moe_layers)
    name = min(experts)
    assert state[name] is state[name]
    assert model_digest(model, layout, NUMERICS[0], state) == model_digest(model, layout, NUMERICS[0])
    state[name].codes[0, 0, 0] ^= 1
    assert model_digest(model, layout, NUMERICS[0], state) != model_digest(model, layout, NUMERICS[0])
