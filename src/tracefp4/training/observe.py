"""How far the trainer's roundings are from the rollout's, counted at every site.

*Flip rate*: share of recorded codes that differ from plain rounding of the trainer's own value at the rollout's scale;
how often the trainer alone would have gone the other way. *Scale mismatch*: share of block scales that the trainer
alone would have chosen differently under the rollout's global scale. With whole codes recorded (4 bits) two more are
known: *wrong codes*, the share of codes the trainer really used that are not the rollout's, the *relative difference*
``||Q_train - Q_roll|| / ||Q_roll||``, and for FP4 elements by how many codebook entries the two codes differ
(*steps*). Congruent scales are taken as restored;
:mod:`tracefp4.training.checks` counts those that are restored wrongly. Sums stay on the device until they are read.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tracefp4.core import Site
from tracefp4.formats.blocks import Quantized, block_scales, normalize
from tracefp4.formats.numerics import Numerics
from tracefp4.quantizers.guided import rollout_scales
from tracefp4.quantizers.stats import flips, wrong_codes
from tracefp4.training.batch import GuidedRows


@dataclass(slots=True)
class SiteCounts:
    """Sums over recorded rows, float64 scalars on the device."""

    values: Tensor
    blocks: Tensor
    flips: Tensor
    scale_misses: Tensor
    wrong_codes: Tensor
    difference: Tensor
    """Squared norm of ``Q_train - Q_roll``."""
    energy: Tensor
    """Squared norm of ``Q_roll``."""
    steps: Tensor
    """``(5,)`` values whose code is 0, 1, 2, 3, 4 or more codebook entries away from the recorded one; zeros unless
    whole FP4 codes were recorded."""

    def add(self, other: SiteCounts) -> None:
        """Add another count in place."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class Observer:
    """Compares what a forward quantizes with recorded outcomes.

    Args:
        truth: the recorded outcomes of the micro-batch in flight; set anew for each one.
    """

    def __init__(self) -> None:
        self.truth: GuidedRows | None = None
        self.counts: dict[Site, SiteCounts] = {}

    def see(self, site: Site, x: Tensor, result: Quantized, numerics: Numerics, rows: Tensor | None) -> None:
        """Count one quantization of ``x (vectors, width)``, which gave ``result``.

        Args:
            site: which site.
            x: what was quantized.
            result: what it became.
            numerics: the site's.
            rows: order of ``x`` if not row-major, as in ``TrainerSites.quantize``.
        """
        truth = self.truth
        recorded = truth.sites.get(site) if truth is not None else None
        if truth is None or recorded is None:
            return
        outcome = recorded.outcome(rows)
        mask = truth.vectors(recorded.shape, rows)[:, None]
        scales = rollout_scales(x, outcome, numerics)
        z = normalize(x, scales, outcome.global_scale, numerics)
        own = block_scales(x, outcome.global_scale, numerics)
        blocks = mask.sum(dtype=torch.float64) * own.shape[-1]
        counts = SiteCounts(
            values=mask.sum(dtype=torch.float64) * x.shape[-1],
            blocks=blocks,
            flips=_sum(flips(z, outcome.low, outcome.bits, numerics) & mask),
            scale_misses=_sum((own != scales) & mask),
            wrong_codes=_sum(wrong_codes(result.codes, outcome.low, outcome.bits, numerics.element) & mask),
            difference=_sum(blocks * 0),
            energy=_sum(blocks * 0),
            steps=torch.zeros(5, dtype=torch.float64, device=x.device),
        )
        if outcome.bits == 4 and numerics.element == "e2m1":
            theirs = Quantized(outcome.low, scales, outcome.global_scale, numerics).dequantize(torch.float32)
            ours = result.dequantize(torch.float32)
            counts.difference = _sum(((ours - theirs) ** 2) * mask)
            counts.energy = _sum((theirs**2) * mask)
            far = (_entry(result.codes) - _entry(outcome.low)).abs().clamp(max=4)
            weight = mask.expand_as(far).double()
            counts.steps = counts.steps.index_add(0, far.reshape(-1), weight.reshape(-1))
        if site in self.counts:
            self.counts[site].add(counts)
        else:
            self.counts[site] = counts

    def totals(self) -> dict[str, float]:
        """Rates over all sites."""
        if not self.counts:
            return {}
        total = next(iter(self.counts.values()))
        total = SiteCounts(**{item.name: torch.zeros_like(getattr(total, item.name)) for item in fields(SiteCounts)})
        for counts in self.counts.values():
            total.add(counts)
        return rates(total)

    def histogram(self) -> list[float]:
        """Shares of codes that are 0, 1, 2, 3, 4 or more codebook entries from the recorded ones; empty if unknown."""
        steps = [counts.steps for counts in self.counts.values()]
        total = torch.stack(steps).sum(0) if steps else torch.zeros(5)
        return (total / total.sum()).tolist() if float(total.sum()) > 0 else []

    def by_site(self) -> dict[Site, dict[str, float]]:
        """Rates of each site, in order of layer and kind."""
        return {site: rates(self.counts[site]) for site in sorted(self.counts)}


def _entry(codes: Tensor) -> Tensor:
    """Position of E2M1 codes in the ordered codebook -6, ..., 6; both zeros are 0."""
    magnitude = (codes & 7).to(torch.int64)
    return torch.where(codes > 7, -magnitude, magnitude)


def rates(counts: SiteCounts) -> dict[str, float]:
    """``flip_rate``, ``scale_mismatch``, ``wrong_code_rate`` and ``relative_difference`` of summed counts."""
    values, blocks = max(float(counts.values), 1.0), max(float(counts.blocks), 1.0)
    energy = float(counts.energy)
    return {
        "flip_rate": float(counts.flips) / values,
        "scale_mismatch": float(counts.scale_misses) / blocks,
        "wrong_code_rate": float(counts.wrong_codes) / values,
        "relative_difference": (float(counts.difference) / energy) ** 0.5 if energy > 0 else 0.0,
    }


def _sum(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float64)
