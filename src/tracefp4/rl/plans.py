"""A plan for a policy, measured on its own rollouts (``plan = "auto:<bytes>"``).

The search is :mod:`tracefp4.guidance.auto`; this says how the gap is measured. A few finished rollouts carry the
largest plan. Scoring them with the trainer, guided by some of their sites, and comparing with the engine's log-probs
gives the mean of ``abs(log p_train - log p_rollout)`` over response tokens. The mean of k3 would be the more natural
measure, but on a few hundred tokens two or three of them decide it.

Where bits can be pulled (:mod:`tracefp4.training.pulls`) there may be nothing to choose: a checked plan of every site,
with what its trainer pulls, often takes a fifth of the bytes of the plan that it equals. It is tried first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from tracefp4.config import Config
from tracefp4.core import Kind, Rollout, Site, SiteShape
from tracefp4.formats.spec import Spec
from tracefp4.guidance.auto import BITS, CHEAP, LARGEST, SCALE_BITS, Choice, budget_of, choose_plan
from tracefp4.guidance.plan import ALL_KINDS, WHOLE, Plan, enough_scale_bits, says_scale_bits
from tracefp4.guidance.record import Record, restrict
from tracefp4.guidance.sizes import bytes_per_token
from tracefp4.methods import get_method
from tracefp4.methods.base import Method
from tracefp4.models.binding import bind, binding_of, unbind
from tracefp4.training.batch import Example, collate, plan_micro_batches
from tracefp4.training.observe import Observer
from tracefp4.training.policy import token_logprobs
from tracefp4.training.sites import TrainerSites

CHECKED = tuple(
    Plan(BITS, None, kinds, bits, checked=True)
    for kinds in (tuple(kind for kind in ALL_KINDS if kind is not Kind.EXPERTS_MID), ALL_KINDS)
    for bits in (2, SCALE_BITS)
)
"""Plans that are tried first where bits can be pulled, the smallest first."""
SEQUENCES = 16
"""Rollouts that a choice is measured on, at most."""


def named_scales(method: Method, text: str, calm: bool = True) -> str:
    """A plan's name that says in how many bits its scales travel.

    A name that says nothing takes what was measured to be enough for the sites that its method follows
    (:func:`tracefp4.guidance.plan.enough_scale_bits`), if engine and trainer stay as near to each other as there: one
    optimizer step on rollouts of the step, by the embedded engine. Several steps a batch or older rollouts let scales
    drift apart (3 % to 20 % of the restored ones were wrong), and what SGLang's and vLLM's own kernels make of them on
    a GPU was never measured; such runs take whole scales. A plan that says ``/s2`` or ``/s3`` has its will.

    Args:
        method: of the run.
        text: a plan as configured; one that is chosen, or of a method that follows none, stays as it is.
        calm: whether the run is of that kind (:func:`is_calm`).

    Raises:
        ConfigError: no such plan, or one that the method has no use for.
    """
    if not method.guided or says_scale_bits(text) or text == "none" or budget_of(text) is not None:
        return text
    found = method.plan(Plan.parse(text, num_layers=4))  # of a share of the layers: how many does not matter
    bits = enough_scale_bits(found.depth, found.kinds, found.spans, method.kinds) if calm else WHOLE
    return f"{text}/s{bits}"


def is_calm(config: Config) -> bool:
    """Whether scales are known to be restored under such settings: fresh rollouts, one step, the embedded engine."""
    train = config.train
    fresh = not (train.lag or train.guided_lag or train.max_lag)
    return config.engine == "embedded" and train.minibatches == 1 and fresh


def resolved(config: Config) -> Config:
    """The settings of a run with what its method brings along, and what its plan leaves open. Twice is as once.

    Raises:
        ConfigError: no such method or plan.
    """
    method = get_method(config.method)
    config = method.settings(config)
    return config.model_copy(update={"plan": named_scales(method, config.plan, is_calm(config))})


def first_plan(method: Method, plan: str, layers: int, chosen: str | None = None) -> Plan | None:
    """What a run records at first; ``None`` if its method guides nothing.

    Args:
        method: the run's.
        plan: as configured; under ``auto:<bytes>`` everything is recorded until a plan was chosen.
        layers: of the model.
        chosen: the plan of a checkpoint that the run goes on from, which a run with a budget had chosen.

    Raises:
        ConfigError: not a plan, or one that the method has no use for.
    """
    if not method.guided:
        return None
    if budget_of(plan):
        return LARGEST if chosen is None else Plan.parse(chosen)
    return method.plan(Plan.parse(plan, layers))


def spread(examples: Sequence[Example], group: int) -> list[Example]:
    """At most :data:`SEQUENCES` examples of as many prompts as possible; ``group`` samples a prompt."""
    return sorted(examples, key=lambda example: (example.index % group, example.index))[:SEQUENCES]


def choose_measured(
    model: nn.Module,
    sites: TrainerSites,
    shapes: Sequence[SiteShape],
    rollouts: Sequence[Rollout],
    records: Sequence[Record],
    budget: float,
    *,
    temperature: float = 1.0,
    micro_tokens: int = 16384,
    pulls: bool = False,
) -> Choice:
    """Choose a plan of at most ``budget`` bytes a token.

    Args:
        model: the trainer's, bound to ``sites``.
        sites: the trainer's site objects.
        shapes: every recordable site of the model.
        rollouts: finished rollouts, spread over prompts; the first :data:`SEQUENCES` of them are used.
        records: their guidance, recorded with at least the bits of :mod:`tracefp4.guidance.auto` at every site.
        budget: bytes a token.
        temperature: of the rollouts.
        micro_tokens: padded rows a forward.
        pulls: bits can be left with the engine until they are pulled.

    Raises:
        ConfigError: not even the smallest part of a plan fits.
        GuidanceError: a record has fewer bits.
    """
    examples = [_example(i, r, record) for i, (r, record) in enumerate(zip(rollouts, records, strict=True))][:SEQUENCES]
    scorer = _Scorer(model, sites, examples, temperature, micro_tokens)
    fits = bytes_per_token(LARGEST, shapes, scorer.num_layers) <= budget
    checked = _choose_checked(scorer, shapes, budget) if pulls and not fits else None
    return checked or choose_plan(shapes, budget, scorer.gap, scorer.differences())


def _choose_checked(scorer: _Scorer, shapes: Sequence[SiteShape], budget: float) -> Choice | None:
    """A checked plan of every site, if one fits and is as good as having the bits."""
    sizes = {plan: bytes_per_token(plan, shapes, scorer.num_layers) for plan in CHECKED}
    possible = [plan for plan, size in sizes.items() if size <= budget]
    full = scorer.gap(frozenset(shape.site for shape in shapes)) if possible else 0.0
    for passes, plan in enumerate(possible, 2):
        gap, pulled = scorer.checked(plan, shapes)
        size = sizes[plan] + pulled
        if size <= budget and gap <= (1 + CHEAP) * full:
            return Choice(plan, size, gap, full, passes)
    return None


class _Scorer:
    """Scores examples under some of the sites that their records hold."""

    def __init__(
        self, model: nn.Module, sites: TrainerSites, examples: Sequence[Example], temperature: float, micro_tokens: int
    ) -> None:
        self._model, self._sites, self._temperature = model, sites, temperature
        self._groups = plan_micro_batches(examples, micro_tokens)
        self._device = next(model.parameters()).device
        self.num_layers = sites.layout.num_layers
        self._gaps: dict[frozenset[Site], float] = {}

    def gap(self, chosen: frozenset[Site]) -> float:
        """Mean of ``abs(delta)`` when the sites ``chosen`` are guided, measured once."""
        if chosen not in self._gaps:
            self._gaps[chosen] = self._run(lambda record: _keep(record, chosen), None)
        return self._gaps[chosen]

    def checked(self, plan: Plan, shapes: Sequence[SiteShape]) -> tuple[float, float]:
        """Mean of ``abs(delta)`` under a checked plan, and the bytes that it pulls a row."""
        self._sites.pulled.take()
        gap = self._run(lambda record: restrict(record, plan, shapes, self.num_layers), None)
        pulled = self._sites.pulled.take()
        rows = sum(example.rows for group in self._groups for example in group)
        return gap, 0.0 if pulled is None else pulled.pulled_bytes / rows

    def differences(self) -> Mapping[Site, float]:
        """Flip rate and scale mismatch of each site under all guidance, added up."""
        observer = Observer()
        self._run(lambda record: record, observer)
        return {site: found["flip_rate"] + found["scale_mismatch"] for site, found in observer.by_site().items()}

    @torch.no_grad()
    def _run(self, cut: Callable[[Record], Record], observer: Observer | None) -> float:
        total = count = 0.0
        for group in self._groups:
            cuts = [None if example.record is None else cut(example.record) for example in group]
            batch = collate([replace(e, record=r) for e, r in zip(group, cuts, strict=True)], self._device)
            with self._sites.batch(batch, observer=observer):
                logprobs = token_logprobs(self._model, batch, self._temperature)[0]
            delta = (logprobs - batch.rollout_logprobs)[batch.response]
            total, count = total + float(delta.abs().sum(dtype=torch.float64)), count + delta.numel()
        self._sites.checks.take()  # Failures under plans that were only tried are nobody's business.
        return total / max(count, 1.0)


def _example(index: int, rollout: Rollout, record: Record) -> Example:
    sites = {site: part.reduce(BITS, SCALE_BITS, record.valid) for site, part in record.sites.items()}
    return Example(
        tokens=rollout.tokens,
        prompt_length=len(rollout.prompt_ids),
        rollout_logprobs=rollout.logprobs,
        index=index,
        record=replace(record, sites=sites),
        routes=rollout.routes,
    )


def _keep(record: Record, chosen: frozenset[Site]) -> Record:
    return replace(record, sites={site: part for site, part in record.sites.items() if site in chosen})


def unbound_copy(model: nn.Module, sites: TrainerSites, spec: Spec) -> nn.Module:
    """A copy of a model for an engine: without the trainer's site objects, where it has any."""
    if binding_of(model) is None:
        return copy.deepcopy(model)
    unbind(model)
    try:
        return copy.deepcopy(model)
    finally:
        bind(model, sites, spec=spec)
