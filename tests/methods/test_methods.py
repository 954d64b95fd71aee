"""What each method quantizes and which settings it brings along."""

import pytest

from tracefp4.config import parse
from tracefp4.errors import ConfigError
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.plan import Plan
from tracefp4.methods import METHODS, get_method
from tracefp4.rl.setup import check_training

SPEC = get_spec("nvfp4-w4a4-kv4")


@pytest.mark.parametrize(
    ("method", "rollout", "trainer"),
    [
        # weights, activations, KV cache: which of them are quantized
        ("bf16", (False, False, False), (False, False, False)),
        ("qat", (True, True, True), (True, True, True)),
        ("qat_w4a16", (True, True, True), (True, False, False)),
        ("qarl", (True, True, True), (True, True, True)),
        ("quads", (True, True, True), (True, False, False)),
        ("tis_sc", (True, True, True), (False, False, False)),
        ("trace", (True, True, True), (True, True, True)),
        ("trace_quads", (True, True, True), (True, False, True)),
    ],
)
def test_what_is_quantized_on_each_side(method, rollout, trainer):
    one = get_method(method)
    for spec, expected in ((one.rollout_spec(SPEC), rollout), (one.trainer_spec(SPEC), trainer)):
        assert tuple(n is not None for n in (spec.weights, spec.activations, spec.kv)) == expected
        # What both sides quantize, they quantize alike.
        assert spec.weights in (None, SPEC.weights)
        assert spec.activations in (None, SPEC.activations)
        assert spec.kv in (None, SPEC.kv)
    assert one.guided == method.startswith("trace")


def test_every_method_is_covered_here():
    assert set(METHODS) == {"bf16", "qat", "qat_w4a16", "qarl", "quads", "tis_sc", "trace", "trace_quads"}


@pytest.mark.parametrize("method", METHODS)
def test_settings_are_stable_under_a_second_application(method):
    config = parse({"method": method, "correction": {"name": "tis", "cap": 3.0}})
    once = get_method(method).settings(config)
    assert get_method(method).settings(once) == once
    if method in ("bf16", "qat", "qat_w4a16", "trace"):
        assert once == config


def test_qarl_brings_the_trust_band_and_keeps_what_is_not_its_own():
    config = parse({"method": "qarl", "loss": {"norm_std": False, "eps_low": 0.2}})
    found = get_method("qarl").settings(config)
    assert (found.loss.name, found.loss.eps_low, found.loss.norm_std) == ("tbpo", 3e-4, False)
    assert (found.correction.name, found.correction.level) == ("icepop", "geometric")
    named = parse({"method": "qarl", "loss": {"name": "tbpo", "eps_low": 0.01}})
    assert get_method("qarl").settings(named) == named


def test_tis_sc_keeps_the_correction_of_the_run():
    for name in ("tis", "none"):
        found = get_method("tis_sc").settings(parse({"method": "tis_sc", "correction": {"name": name}}))
        assert (found.loss.name, found.loss.score_centering, found.correction.name) == ("reinforce", True, name)


@pytest.mark.parametrize("name", ["quads", "trace_quads"])
def test_quads_compensates_half_of_the_channels_unless_told_otherwise(name):
    method = get_method(name)
    assert method.settings(parse({})).rollout.residual == 0.5
    assert method.settings(parse({"rollout": {"residual": 0.25}})).rollout.residual == 0.25


def test_weights_only_is_a_spec_of_its_own():
    mx = get_spec("mxfp4-w4a8-kv4")
    derived = get_method("quads").trainer_spec(mx)
    assert derived.weights == mx.weights and derived.hash != mx.hash
    bare = get_spec("nvfp4-w4a16")
    assert get_method("qat_w4a16").trainer_spec(bare) == bare


def test_unknown_methods_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'quads'"):
        get_method("quad")


def test_trace_follows_a_whole_plan_and_trace_quads_the_kv_cache_of_it():
    whole, part = get_method("trace"), get_method("trace_quads")
    for name, kept in (
        ("r1-all+mid/s2", "r1-all:kv/s2"),
        ("r4-l3:kv", "r4-l3:kv"),
        ("c1-all:k+mid", "c1-all:k"),
        ("r1-all:experts[0-1]+kv[0-2]", "r1-all:kv[0-2]"),
    ):
        plan = Plan.parse(name)
        assert whole.plan(plan) == plan and str(part.plan(plan)) == kept
    with pytest.raises(ConfigError, match="'trace_quads' follows guidance of k, v, latent, and plan 'r1-all:mid'"):
        part.plan(Plan.parse("r1-all:mid"))


def test_compensation_and_guidance_of_the_same_inputs_contradict_each_other():
    for name, fits in (("trace", False), ("trace_quads", True)):
        config = parse({"method": name, "rollout": {"residual": 0.5}})
        if fits:
            check_training(get_method(name).settings(config))
        else:
            with pytest.raises(ConfigError, match="records one rounding of each value"):
                check_training(config)
    with pytest.raises(ConfigError, match="'trace' alone"):
        check_training(get_method("trace_quads").settings(parse({"method": "trace_quads", "plan": "auto:4000"})))
