"""Coverage tables: complete, and loud."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tracefp4.errors import CoverageError
from tracefp4.formats.spec import SPECS, get_spec
from tracefp4.models.binding import bind
from tracefp4.models.coverage import compare, coverage, probe, render
from tracefp4.models.tiny import FAMILIES

SPEC = "nvfp4-w4a4-kv4"


def run(model, tokens):
    with torch.no_grad(), probe(model) as calls:
        model(tokens, use_cache=False)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_table_is_complete(make, tokens, family):
    model, sites, layout = make(family, SPEC, torch.bfloat16)
    bind(model, sites)
    table = coverage(model, get_spec(SPEC), run(model, tokens))
    per_moe, per_kv = 5, 2
    assert len(table.rows) == per_moe * len(layout.moe_layers) + per_kv * len(layout.kv_layers)
    assert all(row.calls == 1 for row in table.rows)
    experts = [p for name, p in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    assert table.quantized_parameters == sum(p.numel() for p in experts)
    assert table.parameters == sum(p.numel() for p in model.parameters())
    compare(table, coverage(model, get_spec(SPEC)))


@pytest.mark.parametrize("spec", SPECS)
def test_specs(make, tokens, spec):
    model, sites, _ = make("qwen3_moe", spec, torch.bfloat16)
    bind(model, sites)
    table = coverage(model, get_spec(spec), run(model, tokens))
    formats = {row.kind: row.format for row in table.rows}
    assert (formats["gate_up"] == "bf16") == (spec in ("bf16", "nvfp4-kv4"))
    assert ("k" in formats) == ("kv4" in spec)


def test_rendered_table_joins_equal_layers(make, tokens):
    model, sites, _ = make("deepseek_v3", SPEC, torch.bfloat16)
    bind(model, sites)
    text = render(coverage(model, get_spec(SPEC), run(model, tokens)))
    assert "1-2" in text
    assert "model.layers.*.mlp.experts" in text
    assert "0-2     model.layers.*.self_attn    latent" in text
    assert len(text.splitlines()) == 9


def test_layer_that_was_not_reached(make, tokens):
    model, sites, layout = make("qwen3_moe", SPEC, torch.bfloat16)
    bind(model, sites)
    module = model.get_submodule(layout.experts[1])
    module.forward = lambda x, index, weights: x
    with pytest.raises(CoverageError, match=r"did not reach: model\.layers\.1\.mlp\.experts \(gate_up\)"):
        coverage(model, get_spec(SPEC), run(model, tokens))


def test_attention_that_was_not_reached(make, tokens):
    model, sites, _ = make("qwen3_5_moe", SPEC, torch.bfloat16)
    bind(model, sites)
    model.set_attn_implementation("eager")
    with pytest.raises(CoverageError, match=r"model\.layers\.1\.self_attn uses the implementation 'eager'"):
        coverage(model, get_spec(SPEC))
    with pytest.raises(CoverageError):
        coverage(model, get_spec(SPEC), run(model, tokens))


def test_site_that_quantizes_less_than_the_spec(make, tokens):
    model, sites, _ = make("qwen3_moe", "nvfp4-w4a16", torch.bfloat16)
    bind(model, sites)
    with pytest.raises(CoverageError, match=r"left unquantized: .*experts \(experts_in\): not nvfp4-te"):
        coverage(model, get_spec("nvfp4-w4a4"), run(model, tokens))


def test_unbound_model(make):
    model, _, _ = make("mixtral")
    with pytest.raises(CoverageError, match="no site objects bound"):
        coverage(model, get_spec("bf16"))
    with pytest.raises(CoverageError, match="no site objects bound"), probe(model):
        pass


def test_probe_leaves_the_site_objects(make, tokens):
    model, sites, layout = make("mixtral", SPEC, torch.bfloat16)
    bind(model, sites)
    module = model.get_submodule(layout.experts[0])
    before = module.tracefp4
    run(model, tokens)
    assert module.tracefp4 is before


def test_sides_that_differ(make):
    model, sites, _ = make("mixtral", SPEC, torch.bfloat16)
    bind(model, sites)
    rollout = coverage(model, get_spec(SPEC))
    with pytest.raises(CoverageError, match=r"self_attn \(k\): rollout nvfp4-te/kv \w+, trainer absent"):
        compare(rollout, coverage(model, get_spec("nvfp4-w4a4")))
    with pytest.raises(CoverageError, match=r"rollout nvfp4-te .* trainer nvfp4-pow2"):
        compare(rollout, coverage(model, get_spec(SPEC, "nvfp4-pow2")))
    fewer = dataclasses.replace(rollout, rows=rollout.rows[:-1])
    with pytest.raises(CoverageError, match=r"model\.layers\.1\.mlp\.experts \(experts_mid\): rollout absent"):
        compare(fewer, rollout)
