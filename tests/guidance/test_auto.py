"""Choosing a plan: budgets are kept, worthless parts go first, and what is gone changes what the rest is worth."""

from __future__ import annotations

import pytest

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import ConfigError
from tracefp4.guidance.auto import (
    LARGEST,
    Choice,
    budget_of,
    choose_depth,
    choose_plan,
    depths,
    simple_plans,
    units,
)
from tracefp4.guidance.plan import Plan, plan_of
from tracefp4.guidance.sizes import bytes_per_token

IN, MID, K, V = Kind.EXPERTS_IN, Kind.EXPERTS_MID, Kind.K, Kind.V
LAYERS = 8


def shapes() -> list[SiteShape]:
    out = []
    for layer in range(LAYERS):
        out += [SiteShape(Site(layer, kind), 2, 32, 16, False) for kind in (K, V)]
        out += [SiteShape(Site(layer, IN), 1, 64, 16, True), SiteShape(Site(layer, MID), 2, 32, 16, True)]
    return out


def additive(worth: dict[Kind, float]):
    """A gap that grows by a fixed amount for each site that is not guided."""
    every = {shape.site for shape in shapes()}

    def gap(sites: frozenset[Site]) -> float:
        return 0.01 + sum(worth[site.kind] for site in every - sites)

    return gap


def chosen(plan: Plan) -> set[Site]:
    return {shape.site for shape in plan.select(shapes(), LAYERS)}


def test_units_are_kinds_in_bands_and_cost_what_the_plan_costs() -> None:
    found = units(shapes(), bands=4)
    assert len(found) == 3 * 4
    assert sum(unit.size for unit in found) == pytest.approx(bytes_per_token(LARGEST, shapes(), LAYERS))
    assert any({str(s) for s in unit.sites} == {"2.k", "2.v", "3.k", "3.v"} for unit in found)


@pytest.mark.parametrize("budget", [60, 150, 200, 300, 1000])
def test_a_budget_is_kept_and_the_name_of_the_plan_says_it(budget: float) -> None:
    choice = choose_plan(shapes(), budget, additive({IN: 3.0, MID: 0.1, K: 1.0, V: 1.0}))
    assert choice.size <= budget
    assert bytes_per_token(Plan.parse(str(choice.plan)), shapes(), LAYERS) == pytest.approx(choice.size)
    assert choice.full_gap == pytest.approx(0.01)
    if budget == 1000:
        assert choice.plan == LARGEST and choice.passes == 1


def test_what_is_worth_least_goes_first() -> None:
    everything = bytes_per_token(LARGEST, shapes(), LAYERS)
    mids = bytes_per_token(Plan.parse("r1-all:mid/s3"), shapes(), LAYERS)
    choice = choose_plan(shapes(), everything - mids, additive({IN: 3.0, MID: 0.0, K: 1.0, V: 1.0}))
    assert str(choice.plan) == "r1-all/s3"


def test_sites_where_nothing_differs_go_before_anything_is_measured() -> None:
    differences = {shape.site: 0.0 if shape.site.kind == MID else 0.01 for shape in shapes()}
    everything = bytes_per_token(LARGEST, shapes(), LAYERS)
    choice = choose_plan(shapes(), everything - 1, additive({IN: 3.0, MID: 1.0, K: 1.0, V: 1.0}), differences)
    assert choice.gap < 9
    assert {site.kind for site in {s.site for s in shapes()} - chosen(choice.plan)} == {MID}


def test_each_round_measures_again() -> None:
    """Deeper layers are worth something only while all shallower ones are guided, as on a real model."""

    def gap(sites: frozenset[Site]) -> float:
        first = min((s.site.layer for s in shapes() if s.site not in sites), default=LAYERS)
        return 0.001 + 0.1 * (LAYERS - first)

    size = bytes_per_token(LARGEST, shapes(), LAYERS)
    plan = choose_plan(shapes(), size / 2, gap).plan
    assert chosen(plan) >= {s.site for s in shapes() if s.site.layer < 4}


def test_a_simple_plan_wins_where_greed_loses() -> None:
    """Only all inputs of the experts together are worth anything, so leaving out any one looks alike."""
    inputs = {s.site for s in shapes() if s.site.kind == IN}

    def gap(sites: frozenset[Site]) -> float:
        return 1.0 + 0.01 * len(inputs - sites) if inputs - sites else 0.1 - 0.001 * len(sites)

    size = bytes_per_token(Plan.parse("r1-all:experts/s3"), shapes(), LAYERS)
    assert str(choose_plan(shapes(), size, gap).plan) == "r1-all:experts/s3"


def test_simple_plans_are_prefixes_and_suffixes_within_the_budget() -> None:
    sizes = {s.site: bytes_per_token(plan_of([s.site], shapes(), 1, 3), shapes(), LAYERS) for s in shapes()}
    found = simple_plans(shapes(), 100)
    assert all(sum(sizes[site] for site in sites) <= 100 for sites in found)
    assert any({site.kind for site in sites} == {IN} and {s.layer for s in sites} == set(range(6)) for sites in found)
    assert len(set(found)) == len(found) > 7


def test_a_budget_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="room for nothing; the smallest part takes"):
        choose_plan(shapes(), 5, additive({IN: 1.0, MID: 1.0, K: 1.0, V: 1.0}))


def test_names() -> None:
    assert budget_of("auto:4096") == 4096
    assert budget_of("r1-all") is None
    for text in ("auto", "auto:", "auto:0", "auto:1e3"):
        with pytest.raises(ConfigError, match="did you mean 'auto:4096'"):
            budget_of(text)


@pytest.mark.parametrize(
    ("layers", "tried"),
    [(1, (0,)), (2, (0, 1)), (4, (0, 1)), (5, (0, 1, 2)), (30, (0, 1, 2, 4, 8)), (48, (0, 1, 2, 4, 8))],
)
def test_up_to_a_quarter_of_the_layers_may_be_left_in_bf16(layers: int, tried: tuple[int, ...]) -> None:
    assert depths(layers) == tried


@pytest.mark.parametrize(
    ("gaps", "chosen", "asked"),
    [
        # The plan without such layers is as good as guidance of everything: nothing else is looked at.
        ({0: 1.05, 1: 0.1, 2: 0.1}, 0, [0]),
        # A layer in BF16 has to be worth a tenth of the gap.
        ({0: 2.0, 1: 1.9, 2: 1.85}, 0, [0, 1, 2]),
        ({0: 2.0, 1: 1.7, 2: 1.6}, 1, [0, 1, 2]),
        ({0: 2.0, 1: 1.7, 2: 1.5}, 2, [0, 1, 2]),
        # With one layer everything is reached that two could give.
        ({0: 2.0, 1: 1.0, 2: 0.5}, 1, [0, 1]),
    ],
)
def test_layers_in_bf16_are_tried_while_they_may_help(gaps: dict[int, float], chosen: int, asked: list[int]) -> None:
    seen: list[int] = []

    def choose(layers: int) -> Choice:
        seen.append(layers)
        return Choice(Plan.parse("r1-all:kv"), 10.0, gaps[layers], 1.0, 3)

    best = choose_depth((0, 1, 2), choose)
    assert (best.bf16_layers, best.gap, seen) == (chosen, gaps[chosen], asked)
    assert ("in BF16" in str(best)) == (chosen > 0)
