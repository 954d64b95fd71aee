"""What each method quantizes and which settings it brings along."""

import pytest

from tracefp4.config import parse
from tracefp4.errors import ConfigError
from tracefp4.formats.spec import get_spec
from tracefp4.methods import METHODS, get_method

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
    ],
)
def test_what_is_quantized_on_each_side(method, rollout, trainer):
    one = get_method(method)
    for spec, expected in ((one.rollout_spec(SPEC), rollout), (one.trainer_spec(SPEC), trainer)):
        assert tuple(n is not None for n in (spec.weights, spec.activations, spec.kv)) == expected
        # What both sides quantize, they quantize alike.
        assert spec.weights in (None, SPEC.weights)
        assert spec.activations in (None, SPEC.activations)
    assert one.guided == (method == "trace")


def test_every_method_is_covered_here():
    assert set(METHODS) == {"bf16", "qat", "qat_w4a16", "qarl", "quads", "tis_sc", "trace"}


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


def test_quads_compensates_half_of_the_channels_unless_told_otherwise():
    method = get_method("quads")
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
