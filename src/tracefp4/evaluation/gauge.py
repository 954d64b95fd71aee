"""One set of finished rollouts, scored by one trainer after another.

What is measured of each is a :class:`~tracefp4.evaluation.rows.Row`; flips and scale mismatches are counted for each
site. Trainers share the quantized weights of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from tracefp4.core import Rollout, SiteShape
from tracefp4.evaluation.gap import score
from tracefp4.evaluation.rows import Row, gap_row
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.guidance.auto import Choice
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, restrict
from tracefp4.guidance.sizes import bytes_per_token
from tracefp4.models.binding import bound
from tracefp4.models.layout import describe
from tracefp4.rl.plans import choose_measured
from tracefp4.training.observe import Observer
from tracefp4.training.sites import TrainerSites
from tracefp4.training.weights import WeightOperands


class Gauge:
    """Scores finished rollouts with one trainer after another.

    Args:
        model: the policy; bound and unbound for each trainer.
        spec: the deployed spec.
        temperature: of the rollouts.
        micro_tokens: padded rows a forward.
        note: called with a line when a row is done.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: Spec,
        *,
        temperature: float = 1.0,
        micro_tokens: int = 16384,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.model, self.spec, self.layout = model, spec, describe(model)
        self.shapes: tuple[SiteShape, ...] = self.layout.recordable_shapes(spec)
        self._weights: dict[str | None, WeightOperands] = {}
        self._temperature, self._micro_tokens, self._note = temperature, micro_tokens, note
        self.rows: list[Row] = []
        self.sites: list[dict[str, Any]] = []

    def under(self, spec: Spec) -> Gauge:
        """One for rollouts of the same model under another spec, whose rows are added to these."""
        gauge = Gauge(
            self.model, spec, temperature=self._temperature, micro_tokens=self._micro_tokens, note=self._note
        )  # fmt: skip
        gauge.rows, gauge.sites, gauge._weights = self.rows, self.sites, self._weights
        return gauge

    def floor(self, rollouts: Sequence[Rollout]) -> None:
        """Score BF16 rollouts with a BF16 trainer."""
        self._score("bf16_floor", get_spec("bf16"), rollouts)

    def unguided(self, rollouts: Sequence[Rollout], truth: Sequence[Record], replay: bool = True) -> None:
        """Score FP4 rollouts with a BF16 and with a QAT trainer."""
        if replay:
            self._score("fp4_vs_bf16", get_spec("bf16"), rollouts)
        self._score("qat", self.spec, rollouts, truth=truth, replay=replay)

    def guided(
        self, rollouts: Sequence[Rollout], truth: Sequence[Record], plan: Plan, decoder: str, replay: bool = True
    ) -> None:
        """Score FP4 rollouts with a trainer guided by ``plan``, cut from the whole codes in ``truth``."""
        part = [restrict(record, plan, self.shapes, self.layout.num_layers) for record in truth]
        size = bytes_per_token(plan, self.shapes, self.layout.num_layers)
        self._score(
            "guided",
            self.spec,
            rollouts,
            guidance=part,
            truth=truth,
            plan=str(plan),
            decoder=decoder,
            replay=replay,
            size=size,
        )

    def choose(self, rollouts: Sequence[Rollout], truth: Sequence[Record], budget: int, pulls: bool) -> Choice:
        """Choose a plan of at most ``budget`` bytes a token on some rollouts (:mod:`tracefp4.rl.plans`)."""
        sites = TrainerSites(self.layout, self.spec, "bracket", self._operands(self.spec))
        with bound(self.model, sites):
            return choose_measured(
                self.model,
                sites,
                self.shapes,
                rollouts,
                truth,
                budget,
                temperature=self._temperature,
                micro_tokens=self._micro_tokens,
                pulls=pulls,
            )

    def _operands(self, spec: Spec) -> WeightOperands:
        name = None if spec.weights is None else spec.weights.hash
        return self._weights.setdefault(name, WeightOperands(spec.weights))

    def _score(
        self,
        name: str,
        spec: Spec,
        rollouts: Sequence[Rollout],
        *,
        guidance: Sequence[Record] | None = None,
        truth: Sequence[Record] | None = None,
        plan: str | None = None,
        decoder: str | None = None,
        replay: bool = True,
        size: float | None = None,
    ) -> None:
        sites = TrainerSites(self.layout, spec, decoder or "bracket", self._operands(spec))
        with bound(self.model, sites):
            scored = score(
                self.model,
                sites,
                rollouts,
                guidance=guidance,
                truth=truth,
                replay=replay,
                temperature=self._temperature,
                micro_tokens=self._micro_tokens,
            )
        prompts = _prompt_numbers(rollouts)
        row = gap_row(name, scored, prompts, plan=plan, decoder=decoder, replay=replay, size=size)
        row.bf16_layers = self.spec.bf16_layers if name != "bf16_floor" else 0
        self.rows.append(row)
        self.sites += _site_rows(name, plan, decoder, scored.observer) if replay else []
        self._note(f"{name} {plan or ''} {decoder or ''}: k3 {row.k3:.3g}, mean |dlogp| {row.mean_abs:.3g}")


def _prompt_numbers(rollouts: Sequence[Rollout]) -> list[int]:
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(r.prompt_ids, len(numbers)) for r in rollouts]


def _site_rows(name: str, plan: str | None, decoder: str | None, observer: Observer) -> list[dict[str, Any]]:
    head = {"row": name, "plan": plan, "decoder": decoder}
    return [head | {"layer": site.layer, "kind": str(site.kind)} | found for site, found in observer.by_site().items()]
