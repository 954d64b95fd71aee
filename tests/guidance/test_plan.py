"""Plans: names, choices of sites, and what is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import ConfigError
from tracefp4.guidance.plan import ALL_KINDS, Plan, enough_scale_bits, plan_of, says_scale_bits

IN, MID, K, V, LATENT = Kind.EXPERTS_IN, Kind.EXPERTS_MID, Kind.K, Kind.V, Kind.LATENT


def shapes(layers: int = 4) -> list[SiteShape]:
    out = []
    for layer in range(layers):
        if layer % 2:
            out += [SiteShape(Site(layer, kind), 2, 32, 16, False) for kind in (K, V)]
        out += [SiteShape(Site(layer, IN), 1, 64, 16, True), SiteShape(Site(layer, MID), 2, 32, 16, True)]
    return out


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("r1-l20", Plan(1, 20, (IN, K, V, LATENT))),
        ("r4-all/s8", Plan(4, scale_bits=8)),
        ("r4-all/s3", Plan(4)),
        ("r1-all+mid/s8", Plan(1, None, ALL_KINDS, 8)),
        ("r1-all+mid/s2", Plan(1, None, ALL_KINDS)),
        ("r1-all+mid/s3", Plan(1, None, ALL_KINDS, 3)),
        ("r2-l3/s2", Plan(2, 3, scale_bits=2)),
        ("r1-all:kv", Plan(1, None, (K, V, LATENT))),
        ("r1-all:experts", Plan(1, None, (IN,))),
        ("r1-all:experts+mid", Plan(1, None, (IN, MID))),
        ("r1-all:mid", Plan(1, None, (MID,))),
        ("r3-all:v", Plan(3, None, (V,))),
        ("r1-all:kv+mid/s3", Plan(1, None, (K, V, LATENT, MID), 3)),
        ("r1-all+mid[0-3]", Plan(1, None, ALL_KINDS, 8, ((MID, ((0, 3),)),))),
        ("r1-all:experts[0-19,25]/s2", Plan(1, None, (IN,), 2, ((IN, ((0, 19), (25, 25))),))),
        ("r2-all:experts+kv[0-4]", Plan(2, None, (IN, K, V, LATENT), 8, tuple((k, ((0, 4),)) for k in (K, V, LATENT)))),
        ("c1-all+mid/s2", Plan(1, None, ALL_KINDS, 2, checked=True)),
        ("c4-l3:kv", Plan(4, 3, (K, V, LATENT), checked=True)),
        ("none", Plan(0, kinds=())),
    ],
)
def test_names(text: str, plan: Plan) -> None:
    assert Plan.parse(text) == plan
    assert str(plan) == text


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("r1-all/s3", "r1-all/s3"),
        ("r1-l3+mid/s8", "r1-l3+mid"),
        ("r1-all:kv+experts", "r1-all/s3"),
        ("r1-l2:latent+v+k", "r1-l2:kv"),
        ("r1-all:experts[4-5,0-3]+kv", "r1-all:experts[0-5]+kv"),
        ("r1-all:k[2]+v[2]+latent[2]", "r1-all:kv[2]"),
    ],
)
def test_other_names_of_a_plan_are_shortened(text: str, short: str) -> None:
    assert str(Plan.parse(text)) == short


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("r1-all+mid", 2),
        ("c1-all+mid", 2),
        ("r4-all", 3),
        ("r1-all:kv", 8),
        ("r1-all:experts+mid", 8),
        ("r1-l20+mid", 8),
        ("r1-half", 8),
        ("r1-all+mid[0-3]", 8),
        ("r1-all:experts[0-19]+kv", 8),
        ("none", 8),
    ],
)
def test_scales_take_the_bits_that_were_enough(text: str, bits: int) -> None:
    plan = Plan.parse(text, num_layers=40)
    assert plan.scale_bits == bits and says_scale_bits(str(plan)) == (bits < 8)
    if text != "none":
        for said in (2, 3, 8):
            assert Plan.parse(f"{text}/s{said}", num_layers=40).scale_bits == said
    # In a record or frame a name has always meant whole scales where it says nothing.
    assert "half" in text or Plan.recorded(text).scale_bits == 8 == Plan.recorded(str(Plan.recorded(text))).scale_bits


def test_the_trainer_of_a_method_may_round_less() -> None:
    assert enough_scale_bits(None, (K, V, LATENT), rounded=(K, V, LATENT)) == 3
    assert enough_scale_bits(12, (K, V, LATENT), rounded=(K, V, LATENT)) == 8


@given(
    bits=st.integers(1, 4),
    depth=st.none() | st.integers(1, 99_999),
    kinds=st.lists(st.sampled_from(ALL_KINDS), min_size=1),
    scale_bits=st.sampled_from([8, 3, 2]),
    ranges=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=3),
    checked=st.booleans(),
)
def test_every_plan_has_a_name(
    bits: int, depth: int | None, kinds: list[Kind], scale_bits: int, ranges: list[tuple[int, int]], checked: bool
) -> None:
    spans = ((kinds[0], tuple(ranges)),) if ranges else ()
    plan = Plan(bits, depth, tuple(kinds), scale_bits, spans, checked)
    assert Plan.parse(str(plan)) == plan == Plan.recorded(str(plan))


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("r5-all", "r4-all"),
        ("r1l20", "r1-l20"),
        ("R1-L20", "r1-l20"),
        ("r1-l020", "r1-l20"),
        ("r1-all+mit", "r1-all+mid"),
        ("r1-all+mid/s4", "r1-all+mid/s3"),
        ("r1-all:kvs", "r1-all:kv"),
        ("nonr", "none"),
        ("c1-al+mid", "c1-all+mid"),
    ],
)
def test_errors_name_the_nearest_plan(text: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {nearest!r}?")):
        Plan.parse(text)


@given(st.text(max_size=20))
def test_any_text_is_a_plan_or_a_sentence(text: str) -> None:
    try:
        plan = Plan.parse(text)
    except ConfigError as error:
        assert "plan" in str(error)
    else:
        assert Plan.parse(str(plan)) == plan


def test_a_site_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="names the sites 'k' twice"):
        Plan.parse("r1-all+k")


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 5},
        {"bits": 0},
        {"bits": 1, "depth": 0},
        {"bits": 1, "scale_bits": 4},
        {"bits": 1, "kinds": ()},
        {"bits": 0, "kinds": (), "checked": True},
    ],
)
def test_impossible_plans(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        Plan(**wrong)


def test_select_takes_the_deepest_decoder_layers() -> None:
    chosen = Plan.parse("r1-l2").select(shapes(), 4)
    assert [str(s.site) for s in chosen] == ["2.experts_in", "3.k", "3.v", "3.experts_in"]
    # Depth counts decoder layers, not layers with sites.
    assert [s.site.layer for s in Plan.parse("r1-l3").select(shapes(), 5)] == [2, 3, 3, 3]


def test_select_by_kind() -> None:
    assert {s.site.kind for s in Plan.parse("r1-all:kv").select(shapes(), 4)} == {K, V}
    assert Plan.parse("r1-all+mid").select(shapes(), 4) == tuple(shapes())
    assert Plan.parse("none").select(shapes(), 4) == ()
    assert not Plan.parse("none")
    assert Plan.parse("r1-all")


def test_spans_select_layers_of_a_kind() -> None:
    chosen = Plan.parse("r1-all:experts[0,2-3]+kv[3]").select(shapes(), 4)
    assert [str(s.site) for s in chosen] == ["0.experts_in", "2.experts_in", "3.k", "3.v", "3.experts_in"]
    with pytest.raises(ConfigError, match="names layer 4, the model has layers 0 to 3"):
        Plan.parse("r1-all:experts[0-4]").select(shapes(), 4)
    for wrong in ("r1-all:experts[3-2]", "r1-all:experts[]", "r1-all:experts[1"):
        with pytest.raises(ConfigError, match="plan|span"):
            Plan.parse(wrong)
    with pytest.raises(ConfigError, match="does not record them"):
        Plan(1, None, (IN,), 8, ((MID, ((0, 1),)),))


@given(st.sets(st.integers(0, 11), min_size=1))
def test_any_set_of_sites_is_a_plan(numbers: set[int]) -> None:
    every = shapes()
    sites = {every[i].site for i in numbers}
    plan = plan_of(sites, every, scale_bits=2)
    assert {s.site for s in plan.select(every, 4)} == sites
    assert Plan.parse(str(plan)) == plan


def test_names_of_sets_of_sites_are_short() -> None:
    every = shapes()
    assert str(plan_of([s.site for s in every], every)) == "r1-all+mid/s2"
    assert str(plan_of([s.site for s in every if s.site.kind != MID], every)) == "r1-all/s3"
    # Layers 1 and 3 alone have a KV cache, so 1 to 3 is what names both.
    assert str(plan_of([s.site for s in every if s.site.kind in (K, V)], every)) == "r1-all:kv"
    assert str(plan_of([s.site for s in every if s.site.layer < 2], every)) == "r1-all:experts[0-1]+kv[1]+mid[0-1]"
    with pytest.raises(ConfigError, match=r"site 9.k is not one"):
        plan_of([Site(9, K)], every)


def test_select_refuses_what_the_model_lacks() -> None:
    with pytest.raises(ConfigError, match=r"covers 20 layers, the model has 4 \(did you mean 'r1-all/s8'\?\)"):
        Plan.parse("r1-l20").select(shapes(), 4)
    with pytest.raises(
        ConfigError, match=r"selects no site; the model has experts_in, experts_mid, k, v in layers 0 to 3"
    ):
        Plan.parse("r1-all:latent").select(shapes(), 4)
    with pytest.raises(ConfigError, match="the spec quantizes no site"):
        Plan.parse("r1-all").select([], 4)
