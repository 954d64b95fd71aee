"""Layouts and site shapes."""

from __future__ import annotations

import pytest
import torch

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import FormatError, ModelError
from tracefp4.formats.spec import get_spec
from tracefp4.models.layout import describe
from tracefp4.models.tiny import FAMILIES, tiny_model

EXPECTED = {
    # family: (layers, MoE layers, KV layers, experts, KV heads, head_dim, v_head_dim)
    "qwen3_moe": (2, (0, 1), (0, 1), 8, 2, 32, 32),
    "qwen3_5_moe": (4, (0, 1, 2, 3), (1, 3), 8, 2, 32, 32),
    "qwen3_next": (4, (0, 1, 2, 3), (1, 3), 8, 2, 32, 32),
    "gpt_oss": (2, (0, 1), (0, 1), 8, 2, 32, 32),
    "olmoe": (2, (0, 1), (0, 1), 8, 2, 32, 32),
    "mixtral": (2, (0, 1), (0, 1), 4, 2, 32, 32),
    "deepseek_v3": (3, (1, 2), (0, 1, 2), 8, 4, 64, 32),
    "glm4_moe": (3, (1, 2), (0, 1, 2), 8, 2, 32, 32),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_of_each_family(family):
    layout = describe(tiny_model(family))
    layers, moe, kv, experts, heads, width, v_width = EXPECTED[family]
    assert layout.family == family
    assert (layout.num_layers, layout.moe_layers, layout.kv_layers) == (layers, moe, kv)
    assert layout.linear_layers == tuple(i for i in range(layers) if i not in kv)
    assert (layout.num_experts, layout.top_k, layout.hidden, layout.intermediate) == (experts, 2, 64, 96)
    assert (layout.kv_heads, layout.head_dim, layout.v_head_dim) == (heads, width, v_width)
    assert (layout.latent_rank, layout.rope_dim) == ((64, 32) if family == "deepseek_v3" else (None, None))


def test_layout_reads_mixed_layers():
    layout = describe(tiny_model("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[1, 3]))
    assert layout.moe_layers == (0, 2)
    assert layout.kv_layers == (0, 1, 2, 3)


def test_site_shapes():
    layout = describe(tiny_model("qwen3_5_moe"))
    shapes = layout.site_shapes(get_spec("nvfp4-w4a4-kv4"))
    assert [str(shape.site) for shape in shapes[:6]] == [
        "0.experts_in",
        "0.experts_mid",
        "1.k",
        "1.v",
        "1.experts_in",
        "1.experts_mid",
    ]
    by_site = {shape.site: shape for shape in shapes}
    assert by_site[Site(1, Kind.K)] == SiteShape(Site(1, Kind.K), 2, 32, 16, False)
    assert by_site[Site(1, Kind.EXPERTS_IN)] == SiteShape(Site(1, Kind.EXPERTS_IN), 1, 64, 16, True)
    assert by_site[Site(1, Kind.EXPERTS_MID)] == SiteShape(Site(1, Kind.EXPERTS_MID), 2, 96, 16, True)


def test_site_shapes_of_latent_attention():
    shapes = describe(tiny_model("deepseek_v3")).site_shapes(get_spec("nvfp4-kv4"))
    assert [(str(s.site), s.vectors, s.width) for s in shapes[:2]] == [("0.latent", 1, 64), ("0.k", 1, 32)]
    assert len(shapes) == 6


def test_site_shapes_of_partial_specs():
    layout = describe(tiny_model("mixtral"))
    assert layout.site_shapes(get_spec("bf16")) == ()
    assert layout.site_shapes(get_spec("nvfp4-w4a16")) == ()
    assert {s.site.kind for s in layout.site_shapes(get_spec("nvfp4-w4a4"))} == {Kind.EXPERTS_IN, Kind.EXPERTS_MID}
    shapes = layout.site_shapes(get_spec("mxfp4-w4a4-kv4"))
    assert {(s.block, s.token_scale) for s in shapes} == {(32, False)}


def test_width_that_is_no_multiple_of_the_block():
    layout = describe(tiny_model("qwen3_moe", moe_intermediate_size=104))
    with pytest.raises(
        FormatError, match=r"0\.experts_mid \(model\.layers\.0\.mlp\.experts\): width 104 .* 16 of nvfp4"
    ):
        layout.site_shapes(get_spec("nvfp4-w4a4-kv4"))
    layout = describe(tiny_model("gpt_oss", head_dim=16))
    layout.site_shapes(get_spec("nvfp4-w4a4-kv4"))
    with pytest.raises(FormatError, match=r"0\.k \(model\.layers\.0\.self_attn\): width 16"):
        layout.site_shapes(get_spec("mxfp4-w4a4-kv4"))


def test_models_without_a_decoder_are_refused():
    with pytest.raises(ModelError, match="expected one list of decoder layers"):
        describe(torch.nn.Linear(2, 2))


def test_layers_that_differ_are_refused():
    model = tiny_model("qwen3_moe")
    model.get_submodule("model.layers.1.mlp.gate").top_k = 3
    with pytest.raises(ModelError, match="differ"):
        describe(model)
