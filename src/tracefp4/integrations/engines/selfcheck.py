"""The proof after new weights: a probe prompt whose codes and log-probs must match.

Equal checksums say that both sides hold the same weights. They do not say that the engine computes the same model with
them: a head size or a rope base that its model class takes from elsewhere, an expert that it routes to but never loaded
into its kernel's layout, K and V recorded in another order of heads. So one prompt is generated, and the trainer scores
it. Two things are looked at:

- the first layer's codes. What enters them has passed through little arithmetic, so two correct paths agree on most of
  them, while a wrong weight or a shifted row leaves hardly more agreement than chance;
- the log-probs under guidance, with every rounding that the plan covers taken from the engine.

The limits are wide: they are meant for mistakes, not for rounding noise between two code bases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.core import Rollout
from tracefp4.errors import SyncError
from tracefp4.evaluation.gap import Scored, score
from tracefp4.formats.spec import Spec
from tracefp4.guidance.record import Record
from tracefp4.integrations.engines.weights import hollow
from tracefp4.models.binding import bound
from tracefp4.models.layout import describe
from tracefp4.models.packing import PackedWeight
from tracefp4.training.sites import TrainerSites
from tracefp4.training.weights import WeightOperands

FLIPS = 0.35
"""Most codes of the first layer that may differ, by kind of site. Two independent roundings differ in most."""
GAP = 2.0
"""Largest difference of a log-prob under full guidance of every layer, in nats."""
LOOSE_GAP = 8.0
"""The same when some layers are not guided: their noise is not a mistake."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the probe showed."""

    gap: float
    """Largest difference of a log-prob, in nats."""
    flips: dict[str, float]
    """Share of codes that differ at the first recorded layer, by kind of site."""


def probe_prompt(vocabulary: int, length: int = 24) -> tuple[int, ...]:
    """Token ids of the probe, the same for every engine."""
    generator = torch.Generator().manual_seed(20)
    return tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist())


def self_check(
    model: Any,
    state: Mapping[str, Tensor | PackedWeight],
    spec: Spec,
    rollouts: Sequence[Rollout],
    records: Sequence[Record] | None,
) -> SelfCheck:
    """Score the probe with the trainer's arithmetic, and judge.

    Args:
        model: the model with or without weights; it is not changed.
        state: the weights that were sent, by name. They are read in place; packed ones are used as they are.
        spec: what both sides quantize.
        rollouts: of the probe prompt, at temperature 1.
        records: their guidance; ``None`` without a plan.

    Raises:
        SyncError: codes or log-probs do not match; the message says which.
    """
    filled = hollow(model)
    plain = {name: tensor.detach() for name, tensor in state.items() if isinstance(tensor, Tensor)}
    filled.load_state_dict(plain, strict=False, assign=True)
    filled.tie_weights()
    layout, weights = describe(filled), WeightOperands(spec.weights)
    for name, packed in state.items():
        if isinstance(packed, PackedWeight):
            _fill(filled, name, packed, weights)
    sites = TrainerSites(layout, spec, "bracket", weights)
    with bound(filled.eval(), sites):
        found = score(filled, sites, rollouts, guidance=records, truth=records)
    every = records is not None and len(records[0].sites) == len(layout.recordable_shapes(spec))
    return _judge(found, GAP if every or not layout.recordable_shapes(spec) else LOOSE_GAP)


def _fill(model: Any, name: str, packed: PackedWeight, weights: WeightOperands) -> None:
    """Let ``weights`` serve a packed weight; its parameter is one NaN, for nobody is to read it."""
    path, _, projection = name.rpartition(".")
    module, device = model.get_submodule(path), packed.codes.device
    hollowed = getattr(module, projection)
    nothing = torch.full((), float("nan"), dtype=hollowed.dtype, device=device).expand(hollowed.shape)
    setattr(module, projection, nn.Parameter(nothing, requires_grad=False))
    weights.put(module, projection, packed)


def _judge(found: Scored, limit: float) -> SelfCheck:
    by_site = found.observer.by_site()
    first = min((site.layer for site in by_site), default=0)
    flips = {str(site.kind): float(row["flip_rate"]) for site, row in by_site.items() if site.layer == first}
    check = SelfCheck(float(abs(found.all).max()), flips)
    wrong = {kind: rate for kind, rate in flips.items() if rate > FLIPS}
    if wrong and first == 0:
        kind, rate = max(wrong.items(), key=lambda item: item[1])
        raise SyncError(
            f"the engine's codes do not match: {rate:.0%} of those of {kind} in layer {first} differ from the "
            "trainer's, so it computes another model with the same weights"
        )
    if not check.gap <= limit:
        raise SyncError(
            f"the engine's log-probs do not match: a probe token differs by {check.gap:.2f} nats, at most {limit} are "
            "expected; it computes another model with the same weights"
        )
    return check
