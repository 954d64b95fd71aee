"""A plan for a given number of bytes a token, chosen by measuring what each part of it is worth.

Depth is a poor guide. What a site's guidance is worth depends on how often the trainer would round the other way
there, on what that does to the log-probs, and on which other sites are guided: an unguided early layer moves the
trainer so far that bits of deeper ones name the wrong neighbour. So parts cannot be priced one by one.

They are taken away from the largest plan in rounds. A part (:class:`Unit`) is one kind of site, K and V together, in a
band of neighbouring layers. Whole kinds are tried first, and go if that changes next to nothing; then bands of a few
layers. Each round

1. leaves out each unit by itself and measures the gap of trainer and rollout,
2. takes away the units whose loss costs the gap least for each byte saved, until half of the excess bytes is gone,

and the next round measures again, because what is gone changes what the rest is worth. Where one pass under the
largest plan saw no difference in a unit at all, neither of a code nor of a scale, it goes before anything is measured.
What is left of the budget in the end takes units back, the most missed first. Greed can lose to a simple plan, so
those are measured too: every choice of kinds, in as many of the deepest or of the first layers as the budget permits.
The smallest gap wins.

There is another way to save the bytes of shallow layers, which cost most when they are missing: leave them in bfloat16
on both sides. Nothing is rounded there, so there is nothing to record, and what reaches the first rounded layer differs
by no more than the noise of bfloat16. The price is memory, not bytes a token that travel: K and V of such a layer and
its experts are 3.6 times as large. So a plan is chosen without such layers first. A number of them (:func:`depths`) is
tried only while guidance of everything would be better by more than a tenth, and taken only for a gap that is smaller
by a tenth (:func:`choose_depth`). It is another deployment, whose rollouts have to be sampled anew.

Whoever calls says how the gap is measured (:mod:`tracefp4.rl.plans`); this is arithmetic on sites and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from tracefp4.core import KV_KINDS, Kind, Site, SiteShape
from tracefp4.errors import ConfigError
from tracefp4.guidance.plan import ALL_KINDS, Plan, plan_of
from tracefp4.guidance.sizes import site_bytes

BANDS = (1, 5)
"""Numbers of bands that the layers of a kind are cut into: whole kinds first, then a few layers each."""

CHEAP = 0.1
"""By how much of itself the gap may grow for a unit to go from a cut that is not the finest."""

BITS, SCALE_BITS = 1, 3
"""What a chosen plan keeps of each code and block scale. Two bits of a scale are too few where sites are left out."""

LARGEST = Plan(BITS, None, ALL_KINDS, SCALE_BITS)
"""What is recorded to choose from: every site."""

Gap = Callable[[frozenset[Site]], float]
"""The gap of trainer and rollout when these sites are guided and no others."""

_NAME = re.compile(r"auto:([1-9][0-9]{0,8})")


def budget_of(text: str) -> int | None:
    """Bytes a token of a plan ``auto:<bytes>``; ``None`` for any other text.

    Raises:
        ConfigError: it starts with ``auto`` and names no bytes.
    """
    match = _NAME.fullmatch(text)
    if match is None and text.startswith("auto"):
        raise ConfigError(f"plan {text!r} names no bytes a token (did you mean 'auto:4096'?)")
    return None if match is None else int(match.group(1))


@dataclass(frozen=True, slots=True)
class Unit:
    """Sites that are kept or left out together."""

    sites: frozenset[Site]
    size: float
    """Bytes a token."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen plan, and how it was found."""

    plan: Plan
    size: float
    """Bytes a token."""
    gap: float
    """Measured under the plan."""
    full_gap: float
    """Measured under the largest plan."""
    passes: int
    """Times that the gap was measured."""
    bf16_layers: int = 0
    """First layers that are left in bfloat16, on both sides."""

    def __str__(self) -> str:
        layers = f", {self.bf16_layers} layer{'s' * (self.bf16_layers > 1)} in BF16" if self.bf16_layers else ""
        return (
            f"plan {self.plan}{layers}, {self.size:.0f} B a token, gap {self.gap:.3g} "
            f"(of everything: {self.full_gap:.3g}), {self.passes} passes"
        )


def depths(num_layers: int) -> tuple[int, ...]:
    """How many first layers may be left in bfloat16: none, then powers of two, up to a quarter of the model."""
    return (0, *(1 << i for i in range(num_layers.bit_length()) if 1 << i <= -(-num_layers // 4) < num_layers))


def choose_depth(tried: Sequence[int], choose: Callable[[int], Choice]) -> Choice:
    """Choose how many first layers are left in bfloat16, and the plan for the rest.

    Args:
        tried: numbers of layers, the fewest first; see :func:`depths`.
        choose: the best plan with so many, chosen on rollouts of that deployment.
    """
    found = best = replace(choose(tried[0]), bf16_layers=tried[0])
    enough = (1 + CHEAP) * best.full_gap
    for layers in tried[1:]:
        if found.gap <= enough:
            break
        found = replace(choose(layers), bf16_layers=layers)
        if found.gap < (1 - CHEAP) * best.gap:
            best = found
    return best


def units(shapes: Sequence[SiteShape], bands: int) -> list[Unit]:
    """Cut sites into units: kind by kind (K, V and latent as one), in bands of equally many layers.

    Args:
        shapes: sites that are left; bands are cut out of these.
        bands: at most so many a kind.
    """
    groups: dict[Kind, list[SiteShape]] = {}
    for shape in shapes:
        groups.setdefault(_group(shape), []).append(shape)
    found = []
    for group in groups.values():
        layers = sorted({shape.site.layer for shape in group})
        count = min(bands, len(layers))
        for i in range(count):
            band = set(layers[i * len(layers) // count : (i + 1) * len(layers) // count])
            members = [shape for shape in group if shape.site.layer in band]
            size = sum(site_bytes(shape, BITS, SCALE_BITS) for shape in members)
            found.append(Unit(frozenset(shape.site for shape in members), size))
    return found


def choose_plan(
    shapes: Sequence[SiteShape], budget: float, gap: Gap, differences: Mapping[Site, float] | None = None
) -> Choice:
    """Choose a plan of at most ``budget`` bytes a token.

    Args:
        shapes: every recordable site of the model.
        budget: bytes a token, as :func:`tracefp4.guidance.sizes.bytes_per_token` counts them.
        gap: measures a set of sites; smaller is better.
        differences: of each site under the largest plan, if known: 0 where trainer and rollout round alike.

    Raises:
        ConfigError: not even the smallest unit fits.
    """
    search = _Search(shapes, budget, gap)
    full = search.measure(search.sites)
    if search.excess <= 0:
        return Choice(LARGEST, search.size, full, full, search.passes)
    search.drop_idle(differences or {})
    while search.excess > 0:
        search.halve()
    search.take_back()
    candidates = [sites for sites in (search.sites, *simple_plans(shapes, budget)) if sites]
    if not candidates:
        least = min(unit.size for unit in units(shapes, BANDS[-1]))
        raise ConfigError(
            f"plan 'auto:{budget:g}' has room for nothing; the smallest part takes {least:g} bytes a token"
        )
    best = min(candidates, key=search.measure)
    size = sum(site_bytes(shape, BITS, SCALE_BITS) for shape in shapes if shape.site in best)
    return Choice(plan_of(best, shapes, BITS, SCALE_BITS), size, search.measure(best), full, search.passes)


def simple_plans(shapes: Sequence[SiteShape], budget: float) -> list[frozenset[Site]]:
    """Every choice of kinds (K, V and latent as one), in the deepest and in the first layers that fit into a budget."""
    layers = sorted({shape.site.layer for shape in shapes})
    kinds = sorted({_group(shape) for shape in shapes})
    found: list[frozenset[Site]] = []
    for count in range(1, len(kinds) + 1):
        for chosen in combinations(kinds, count):
            for order in (layers, layers[::-1]):
                sites: frozenset[Site] = frozenset()
                left = budget
                for layer in order:
                    here = [s for s in shapes if s.site.layer == layer and _group(s) in chosen]
                    left -= sum(site_bytes(shape, BITS, SCALE_BITS) for shape in here)
                    if left < 0:
                        break
                    sites |= {shape.site for shape in here}
                if sites and sites not in found:
                    found.append(sites)
    return found


def _group(shape: SiteShape) -> Kind:
    """K, V and latent count as one kind."""
    return Kind.K if shape.site.kind in KV_KINDS else shape.site.kind


class _Search:
    """The sites that are kept, and what is known of the worth of others."""

    def __init__(self, shapes: Sequence[SiteShape], budget: float, gap: Gap) -> None:
        self._shapes, self.budget, self._gap = shapes, budget, gap
        self.sites = frozenset(shape.site for shape in shapes)
        self._known: dict[frozenset[Site], float] = {}
        self._missed: list[tuple[float, Unit]] = []
        self._level = 0
        self.passes = 0

    @property
    def _kept(self) -> list[SiteShape]:
        return [shape for shape in self._shapes if shape.site in self.sites]

    @property
    def size(self) -> float:
        """Bytes a token of what is kept."""
        return sum(site_bytes(shape, BITS, SCALE_BITS) for shape in self._kept)

    @property
    def excess(self) -> float:
        """Bytes a token over the budget."""
        return self.size - self.budget

    def measure(self, sites: frozenset[Site]) -> float:
        """The gap under some sites, measured once."""
        if sites not in self._known:
            self._known[sites] = self._gap(sites)
            self.passes += 1
        return self._known[sites]

    def drop_idle(self, differences: Mapping[Site, float]) -> None:
        """Leave out units where nothing differs, the largest first, as long as there are too many bytes."""
        idle = [u for u in units(self._shapes, BANDS[-1]) if all(differences.get(s, 1.0) == 0.0 for s in u.sites)]
        for unit in sorted(idle, key=lambda unit: -unit.size):
            if self.excess > 0:
                self._drop(0.0, unit)

    def halve(self) -> None:
        """One round: measure what each unit is worth, and take away half of the excess bytes."""
        here, goal = self.measure(self.sites), self.excess / 2
        cut = units(self._kept, BANDS[self._level])
        worth = {unit: self.measure(self.sites - unit.sites) - here for unit in cut}
        finest = self._level == len(BANDS) - 1
        found = [unit for unit in cut if finest or worth[unit] <= CHEAP * here]
        if not found:
            self._level += 1
        for unit in sorted(found, key=lambda unit: worth[unit] / unit.size):
            self._drop(worth[unit] / unit.size, unit)
            if self.excess <= goal:
                break

    def take_back(self) -> None:
        """Spend what is left of the budget, in the finest units."""
        for _, missed in sorted(self._missed, key=lambda item: -item[0]):
            shapes = [shape for shape in self._shapes if shape.site in missed.sites - self.sites]
            for unit in units(shapes, BANDS[-1]):
                if unit.size <= -self.excess:
                    self.sites |= unit.sites

    def _drop(self, worth: float, unit: Unit) -> None:
        self.sites -= unit.sites
        self._missed.append((worth, unit))
