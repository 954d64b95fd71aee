from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tracefp4.core import Kind
from tracefp4.errors import FormatError
from tracefp4.formats.numerics import NUMERICS, Numerics, get_numerics
from tracefp4.formats.spec import SPECS, get_spec


@pytest.mark.parametrize("name", NUMERICS)
def test_presets_carry_their_name(name):
    n = get_numerics(name)
    assert n.name == name
    assert len(n.hash) == 16 and int(n.hash, 16) >= 0
    assert n == get_numerics(name)


def test_hashes_differ_between_presets():
    assert len({get_numerics(n).hash for n in NUMERICS}) == len(NUMERICS)


def test_the_hash_covers_every_field():
    """A frame recorded under other arithmetic must not pass as ours: changing any field changes the hash."""
    base = get_numerics("nvfp4-te")
    other = {
        "name": "x",
        "element": "e4m3",
        "block": 32,
        "ties": "up",
        "negative_zero": "positive",
        "scale_rule": "divide",
        "scale_floor": 2.0**-9,
        "zero_scale": 1.0,
        "quotient": "divide",
        "scope": "tensor",
        "global_rule": "pow2",
        "global_form": "decode",
        "constant": 0.5,
    }
    hashes = {base.hash} | {replace(base, **{k: v}).hash for k, v in other.items()}
    hashes.add(get_numerics("mxfp4-ocp").hash)
    assert len(hashes) == len(other) + 2
    untested = {f.name for f in fields(Numerics)} - set(other)
    assert untested == {"scale_format", "nonfinite", "epilogue"}  # one value each, or tied to another field


def test_the_default_hash_is_stable():
    """Guidance outlives a process; a hash that moves without a change of arithmetic would orphan it."""
    assert get_numerics("nvfp4-te").hash == "53a1033776fc9676"
    assert get_numerics("mxfp4-ceil").hash == "d6caf42497d99b54"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ties": "evne"}, "did you mean 'even'"),
        ({"block": 24}, "valid are 16 and 32"),
        ({"scale_rule": "ceil"}, "cannot make e4m3 scales"),
        ({"scale_format": "e8m0", "scale_rule": "ceil"}, "no global scale"),
        ({"constant": 0.0}, "positive and finite"),
        ({"scale_floor": 0.3}, "no e4m3 number"),
        ({"zero_scale": 500.0}, "no e4m3 number"),
        ({"scale_format": "e8m0", "scale_rule": "ceil", "scope": "none"}, "no e8m0 number"),
        ({"global_rule": "amax-rcp", "global_form": "decode"}, "makes an encode scale"),
    ],
)
def test_impossible_numerics_are_refused(change, message):
    with pytest.raises(FormatError, match=message):
        replace(get_numerics("nvfp4-te"), **change)


def test_unknown_presets_name_the_nearest():
    with pytest.raises(FormatError, match="did you mean 'nvfp4-pow2'"):
        get_numerics("nvfp4-pow")


@pytest.mark.parametrize(
    ("name", "weights", "activations", "kv"),
    [
        ("nvfp4-w4a4-kv4", "tensor", "token", "constant"),
        ("nvfp4-w4a4", "tensor", "token", None),
        ("nvfp4-kv4", None, None, "constant"),
        ("nvfp4-w4a16", "tensor", None, None),
        ("mxfp4-w4a4-kv4", "none", "none", "none"),
        ("mxfp4-w4a16", "none", None, None),
        ("mxfp4-w4a16-kv4", "none", None, "none"),
        ("bf16", None, None, None),
    ],
)
def test_specs_set_the_scope_of_the_global_scale(name, weights, activations, kv):
    spec = get_spec(name)
    scopes = [n.scope if n else None for n in (spec.weights, spec.activations, spec.kv)]
    assert scopes == [weights, activations, kv]
    assert spec.for_kind(Kind.EXPERTS_IN) is spec.for_kind(Kind.EXPERTS_MID) is spec.activations
    assert spec.for_kind(Kind.K) is spec.for_kind(Kind.V) is spec.for_kind(Kind.LATENT) is spec.kv


def test_w4a8_has_mxfp8_activations():
    spec = get_spec("mxfp4-w4a8-kv4")
    assert [n.name for n in (spec.weights, spec.activations, spec.kv)] == ["mxfp4-ceil", "mxfp8", "mxfp4-ceil"]


def test_a_spec_follows_its_base_numerics():
    spec = get_spec("nvfp4-w4a4-kv4", "nvfp4-pow2")
    for n, scope in ((spec.weights, "tensor"), (spec.activations, "token"), (spec.kv, "constant")):
        assert replace(n, name="nvfp4-pow2", scope="token") == get_numerics("nvfp4-pow2")
        assert n.scope == scope
    ct = get_spec("nvfp4-w4a4", "nvfp4-ct")
    assert (ct.weights.name, ct.activations.name) == ("nvfp4-ct", "nvfp4-ct/activation")


def test_the_kv_cache_can_follow_another_preset():
    spec = get_spec("nvfp4-w4a4-kv4", kv="sglang-kv-mx")
    assert spec.kv == get_numerics("sglang-kv-mx")
    assert get_spec("nvfp4-w4a4", kv="sglang-kv-mx").kv is None


def test_spec_hashes():
    hashes = {get_spec(s).hash for s in SPECS} | {get_spec("nvfp4-w4a4", "nvfp4-pow2").hash}
    assert len(hashes) == len(SPECS) + 1
    assert get_spec("nvfp4-w4a4").hash == get_spec("nvfp4-w4a4").hash


def test_specs_refuse_what_they_cannot_be():
    with pytest.raises(FormatError, match="did you mean 'nvfp4-w4a4-kv4'"):
        get_spec("nvfp4-w4a4-kv")
    with pytest.raises(FormatError, match="stores mxfp4, but 'nvfp4-ct' is another format"):
        get_spec("mxfp4-w4a4-kv4", "nvfp4-ct")
    with pytest.raises(FormatError, match="stores nvfp4, but 'mxfp8' is another format"):
        get_spec("nvfp4-w4a4", "mxfp8")
