"""Specs: names, hashes, and the first layers that are left in bfloat16."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.core import Kind, Site
from tracefp4.errors import FormatError, ModelError
from tracefp4.formats.spec import SPECS, get_spec, names_bf16_layers, with_bf16_layers
from tracefp4.methods import METHODS, get_method
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model

QUANTIZED = [name for name in SPECS if name != "bf16"]


@given(st.sampled_from(QUANTIZED), st.integers(0, 9999), st.sampled_from(list(Kind)), st.integers(0, 99))
def test_a_suffix_leaves_the_first_layers_out(name: str, layers: int, kind: Kind, layer: int) -> None:
    plain, spec = get_spec(name), get_spec(f"{name}/b{layers}")
    assert spec.bf16_layers == layers and get_spec(spec.name) == spec
    assert (spec.hash == plain.hash) == (spec.name == name) == (layers == 0)
    left_out = layer < layers
    assert spec.for_site(Site(layer, kind)) == (None if left_out else plain.for_kind(kind))
    assert spec.weights_of(layer) == (None if left_out else plain.weights)
    assert with_bf16_layers(f"{name}/b{layers}", 3) == f"{name}/b3"
    assert names_bf16_layers(f"{name}/b{layers}") and not names_bf16_layers(name)


def test_specs_of_every_number_of_layers_are_told_apart() -> None:
    assert len({get_spec(f"nvfp4-w4a4-kv4/b{n}").hash for n in range(20)}) == 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvfp4-w4a4-kv/b1", "did you mean 'nvfp4-w4a4-kv4'"),
        ("nvfp4-w4a4/b", "Unknown spec 'nvfp4-w4a4/b'"),
        ("nvfp4-w4a4/b01", "Unknown spec"),
        ("nvfp4-w4a4/b1/b1", "Unknown spec"),
        ("bf16/b2", "leaves every layer in bfloat16; its name is 'bf16'"),
    ],
)
def test_other_suffixes_are_refused(name: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        get_spec(name)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_the_same_layers_out_on_both_sides(method: str) -> None:
    found = get_method(method)
    for spec in (found.rollout_spec(get_spec("nvfp4-w4a4-kv4/b2")), found.trainer_spec(get_spec("nvfp4-w4a4-kv4/b2"))):
        assert all(spec.for_site(Site(1, kind)) is None for kind in Kind) and spec.weights_of(1) is None


def test_sites_are_those_of_the_other_layers() -> None:
    layout = describe(tiny_model("qwen3_moe"))
    whole, part = (layout.site_shapes(get_spec(name)) for name in ("nvfp4-w4a4-kv4", "nvfp4-w4a4-kv4/b1"))
    assert part == tuple(shape for shape in whole if shape.site.layer >= 1) and len(part) < len(whole)
    with pytest.raises(ModelError, match="leaves 2 layers in bfloat16, the qwen3_moe model has 2"):
        layout.site_shapes(get_spec("nvfp4-w4a4-kv4/b2"))
