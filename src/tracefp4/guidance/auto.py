"""A plan for a given number of bytes a token, chosen by measuring what each part of it is worth.

Depth is a poor guide. What a site's guidance is worth depends on how often the trainer would round the other way
there, on what that does to the log-probs, and on which other sites are guided: an unguided early layer moves the
trainer so far that bits of deeper ones name the wrong neighbour. So parts cannot be priced one by one.

They are taken away from the largest plan in rounds. A part (:class:`Unit`) is one kind of site, K and V together, in a
band of neighbouring layers. Each round

1. leaves out each remaining unit by itself and measures the gap of trainer and rollout,
2. takes away the units whose loss costs the gap least for each byte saved, until half of the excess bytes is gone,

and the next round measures again, because what is gone changes what the rest is worth. Where one pass under the
largest plan saw no difference in a unit at all, neither of a code nor of a scale, it goes before anything is measured.
What is left of the budget in the end takes units back, the most missed first.

Whoever calls says how the gap is measured (:mod:`tracefp4.rl.plans`); this is arithmetic on sites and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tracefp4.core import KV_KINDS, Kind, Site, SiteShape
from tracefp4.errors import ConfigError
from tracefp4.guidance.plan import ALL_KINDS, Plan, plan_of
from tracefp4.guidance.sizes import site_bytes

BANDS = 6
"""Bands that the layers of a kind are cut into."""

BITS, SCALE_BITS = 1, 2
"""What a chosen plan keeps of each code and block scale: the fewest bits that measurements found to be enough."""

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

    def __str__(self) -> str:
        return (
            f"plan {self.plan}, {self.size:.0f} B a token, gap {self.gap:.3g} (of everything: {self.full_gap:.3g}), "
            f"{self.passes} passes"
        )


def units(shapes: Sequence[SiteShape], bands: int = BANDS) -> list[Unit]:
    """Cut a model's sites into units: kind by kind (K, V and latent as one), in bands of equally many layers."""
    groups: dict[Kind, list[SiteShape]] = {}
    for shape in shapes:
        groups.setdefault(Kind.K if shape.site.kind in KV_KINDS else shape.site.kind, []).append(shape)
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
    shapes: Sequence[SiteShape],
    budget: float,
    gap: Gap,
    differences: Mapping[Site, float] | None = None,
    *,
    bands: int = BANDS,
) -> Choice:
    """Choose a plan of at most ``budget`` bytes a token.

    Args:
        shapes: every recordable site of the model.
        budget: bytes a token, as :func:`tracefp4.guidance.sizes.bytes_per_token` counts them.
        gap: measures a set of sites; smaller is better.
        differences: of each site under the largest plan, if known: 0 where trainer and rollout round alike.
        bands: bands of layers of a kind.

    Raises:
        ConfigError: not even the smallest unit fits.
    """
    search = _Search(units(shapes, bands), budget, gap)
    full = search.measure(search.kept)
    search.drop_idle(differences or {})
    while search.excess > 0:
        search.halve()
    search.take_back()
    if not search.kept:
        least = min(unit.size for unit in search.all)
        raise ConfigError(
            f"plan 'auto:{budget:g}' has room for nothing; the smallest part takes {least:g} bytes a token"
        )
    sites = search.sites(search.kept)
    plan = plan_of(sites, shapes, BITS, SCALE_BITS)
    return Choice(plan, search.size, search.measure(search.kept), full, search.passes)


class _Search:
    """The units that are kept, and what is known of their worth."""

    def __init__(self, every: Sequence[Unit], budget: float, gap: Gap) -> None:
        self.all, self.budget, self._gap = list(every), budget, gap
        self.kept = list(every)
        self._known: dict[frozenset[Site], float] = {}
        self._missed: dict[Unit, float] = {}
        self.passes = 0

    @property
    def size(self) -> float:
        return sum(unit.size for unit in self.kept)

    @property
    def excess(self) -> float:
        return self.size - self.budget

    @staticmethod
    def sites(kept: Sequence[Unit]) -> frozenset[Site]:
        return frozenset().union(*(unit.sites for unit in kept))

    def measure(self, kept: Sequence[Unit]) -> float:
        sites = self.sites(kept)
        if sites not in self._known:
            self._known[sites] = self._gap(sites)
            self.passes += 1
        return self._known[sites]

    def drop_idle(self, differences: Mapping[Site, float]) -> None:
        """Leave out units where nothing differs, the largest first, as long as there are too many bytes."""
        idle = [unit for unit in self.kept if all(differences.get(site, 1.0) == 0.0 for site in unit.sites)]
        for unit in sorted(idle, key=lambda unit: -unit.size):
            if self.excess > 0:
                self.kept.remove(unit)
                self._missed[unit] = 0.0

    def halve(self) -> None:
        """One round: measure what each unit is worth, and take away half of the excess bytes."""
        here, goal = self.measure(self.kept), self.excess / 2
        worth = {unit: self.measure([u for u in self.kept if u is not unit]) - here for unit in self.kept}
        order = sorted(self.kept, key=lambda unit: worth[unit] / unit.size)
        for unit in order:
            self.kept.remove(unit)
            self._missed[unit] = worth[unit]
            if self.excess <= max(goal, 0.0):
                break

    def take_back(self) -> None:
        """Spend what is left of the budget."""
        for unit in sorted(self._missed, key=lambda unit: -self._missed[unit] / unit.size):
            if unit not in self.kept and unit.size <= -self.excess:
                self.kept.append(unit)
