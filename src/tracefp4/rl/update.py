"""Training on one batch of experience.

Each micro-batch loads its own guidance by handle, runs one guided forward, and its loss is already divided by the
denominators of the whole optimizer step. With one optimizer step a batch, the old log-probs *are* those of the update's
own forward; with more, a guided forward without gradient computes them first, in the micro-batches of the update: the
same rows beside the same padding, so that the ratio of the first optimizer step is 1 to the last bit. The mismatch of a
step is that of the first forward, before any update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from tracefp4.config import Config
from tracefp4.core import Handle, Rollout
from tracefp4.errors import EngineError, GuidanceMissing
from tracefp4.guidance.frame import Expectation, decode
from tracefp4.guidance.record import Record
from tracefp4.guidance.store import Store
from tracefp4.rl.centering import centering_term
from tracefp4.rl.clipping import BYPASS
from tracefp4.rl.corrections import CorrectionStats, correction_weights
from tracefp4.rl.losses import Denominators, LossStats, policy_loss
from tracefp4.rl.metrics import mismatch_metrics, response_deltas
from tracefp4.training.batch import Example, MicroBatch, collate, plan_micro_batches
from tracefp4.training.observe import Observer
from tracefp4.training.optimizer import MasterAdamW
from tracefp4.training.policy import TokenScores, score_tokens, token_logprobs
from tracefp4.training.sites import TrainerSites

Loader = Callable[[Example], Record | None]
"""Reads the guidance of one example, or ``None`` for a method without guidance."""


@dataclass(slots=True)
class GuidanceSource:
    """Reads and checks the guidance of rollouts.

    Args:
        store: where the engine put it.
        rollouts: of the step; an example's ``index`` counts in this list.
        expect: what every frame must agree with; the tokens are filled in for each.
    """

    store: Store
    rollouts: Sequence[Rollout]
    expect: Expectation

    def __call__(self, example: Example) -> Record:
        """The record of one example; raises a :class:`~tracefp4.errors.GuidanceError` when it is absent or wrong."""
        return decode(self.store.get(self.handle(example)), replace(self.expect, tokens=example.tokens))

    def handle(self, example: Example) -> Handle:
        """The example's handle; raises :class:`GuidanceMissing` if the rollout carries none."""
        handle = self.rollouts[example.index].guidance
        if handle is None:
            raise GuidanceMissing(f"rollout {self.rollouts[example.index].request_id!r} carries no guidance handle")
        return handle


class Updater:
    """Optimizer steps on the examples of a rollout batch.

    Args:
        model: bound to ``sites``.
        sites: the trainer's site objects.
        optimizer: masters and moments.
        config: the run's settings.
        reference: log-probs of the reference policy for a micro-batch; needed when ``loss.kl`` is not 0.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: TrainerSites,
        optimizer: MasterAdamW,
        config: Config,
        reference: Callable[[MicroBatch], Tensor] | None = None,
    ) -> None:
        self.model, self.sites, self.optimizer, self.config = model, sites, optimizer, config
        self._reference = reference
        self._device = next(model.parameters()).device

    def update(self, examples: Sequence[Example], load: Loader | None, measure_unguided: bool) -> dict[str, float]:
        """Run the optimizer steps of one batch.

        Args:
            examples: everything that trains, of whole groups.
            load: reads guidance; ``None`` without.
            measure_unguided: also measure the mismatch of the same batch without guidance, before the update.

        Returns:
            Metrics of the batch.

        Raises:
            GuidanceMissing: fewer rows are guided than ``train.min_coverage`` asks for. The optimizer step that would
                have trained on them was not applied.
        """
        self.model.train()
        metrics = self._unguided(examples) if measure_unguided and load is not None else {}
        steps = _split(examples, self.config.train.minibatches)
        tally = Tally(self._old_logprobs(steps, load) if len(steps) > 1 else None)
        norms = []
        for part in steps:
            self._accumulate(part, load, tally)
            if load is not None:
                self._check_coverage(tally)
            norms.append(self.optimizer.step())
        metrics |= tally.metrics()
        failed = self.sites.checks.take()
        if failed is not None:
            metrics["guidance/scale_check_failures"] = failed
        metrics["grad_norm"] = float(np.mean(norms))
        metrics["lr"] = self.optimizer.learning_rate()
        return metrics

    def _accumulate(self, examples: Sequence[Example], load: Loader | None, tally: Tally) -> None:
        config = self.config
        lengths = [len(e.tokens) - e.prompt_length for e in examples]
        denominators = Denominators.of(lengths, config.sampling.max_new_tokens)
        for batch in self._batches(examples, load):
            observer = Observer() if tally.wants_observation(batch) else None
            with self.sites.batch(batch, observer=observer):
                scored = score_tokens(self.model, batch, config.sampling.temperature)
                logprobs, self.sites.observer = scored.logprobs, None
                old = tally.old(batch, logprobs)
                weights, corrected = correction_weights(
                    logprobs.detach() if config.loss.name in BYPASS else old,
                    batch.rollout_logprobs,
                    batch.response,
                    config.correction,
                    logprobs=logprobs.detach(),
                    advantages=batch.advantages,
                )
                loss, stats = policy_loss(
                    logprobs,
                    old,
                    batch.advantages,
                    batch.response,
                    denominators,
                    config.loss,
                    weights=weights,
                    ref_logprobs=None if self._reference is None else self._reference(batch),
                    centering=self._centering(batch, scored),
                )
                loss.backward()
            self.optimizer.collect()
            tally.add(batch, logprobs.detach(), scored.entropy, loss.detach(), stats, corrected, observer)

    def _centering(self, batch: MicroBatch, scored: TokenScores) -> Tensor | None:
        """The expected score of the sampler at each response token, ``(B, S)``."""
        config = self.config
        if not config.loss.score_centering:
            return None
        if batch.top is None or scored.top is None:
            raise EngineError("loss.score_centering needs the sampler's top log-probs, and the rollouts carry none")
        cap = config.correction.cap if config.correction.name == "tis" else None
        term = centering_term(scored.top, batch.top.logprobs, cap)
        return torch.zeros_like(scored.logprobs).masked_scatter(batch.response, term)

    def _check_coverage(self, tally: Tally) -> None:
        coverage, least = tally.coverage(), self.config.train.min_coverage
        if coverage < least:
            self.optimizer.zero_grad()
            raise GuidanceMissing(
                f"guidance covers {coverage:.4f} of the rows, less than train.min_coverage = {least}; optimizer step "
                f"{self.optimizer.steps} was not applied"
            )

    @torch.no_grad()
    def _old_logprobs(self, steps: Sequence[Sequence[Example]], load: Loader | None) -> dict[int, Tensor]:
        return {
            index: row[: int(batch.real[b].sum())]
            for part in steps
            for batch in self._batches(part, load)
            for b, (index, row) in enumerate(zip(batch.index, self._forward(batch, guided=True), strict=True))
        }

    @torch.no_grad()
    def _unguided(self, examples: Sequence[Example]) -> dict[str, float]:
        deltas = [
            response_deltas(self._forward(batch, guided=False), batch.rollout_logprobs, batch.response)
            for batch in self._batches(examples, None)
        ]
        return mismatch_metrics(np.concatenate(deltas), "_unguided")

    def _forward(self, batch: MicroBatch, guided: bool) -> Tensor:
        with self.sites.batch(batch, guided=guided):
            return token_logprobs(self.model, batch, self.config.sampling.temperature)[0]

    def _batches(self, examples: Sequence[Example], load: Loader | None):
        for group in plan_micro_batches(examples, self.config.train.micro_tokens):
            yield collate([replace(e, record=load(e)) for e in group] if load else group, self._device)


class Tally:
    """Sums of a batch of experience over its micro-batches."""

    def __init__(self, old: dict[int, Tensor] | None) -> None:
        self._old = old
        self._deltas: list[np.ndarray] = []
        self._entropy = self._tokens = self._loss = 0.0
        self._guided = self._rows = 0.0
        self._has_guidance = False
        self._stats: LossStats | None = None
        self._corrected: CorrectionStats | None = None
        self._observed: dict[str, float] = {}

    def old(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Old log-probs of a micro-batch: those computed before the first update, else the current ones."""
        if self._old is None:
            return logprobs.detach()
        out = torch.zeros_like(logprobs)
        for b, index in enumerate(batch.index):
            row = self._old[index]
            out[b, : len(row)] = row
        return out.detach()

    def wants_observation(self, batch: MicroBatch) -> bool:
        """Flip rates are counted on the first guided micro-batch only: they cost a second quantization."""
        return batch.guidance is not None and not self._observed

    def add(
        self,
        batch: MicroBatch,
        logprobs: Tensor,
        entropy: Tensor,
        loss: Tensor,
        stats: LossStats,
        corrected: CorrectionStats,
        observer: Observer | None,
    ) -> None:
        """Add one micro-batch."""
        before = self.old(batch, logprobs)
        self._deltas.append(response_deltas(before, batch.rollout_logprobs, batch.response))
        self._tokens += float(batch.response.sum())
        self._entropy += float(entropy.sum())
        self._loss += float(loss)
        self._rows += float(batch.real.sum())
        if batch.guidance is not None:
            self._has_guidance = True
            self._guided += float(batch.guidance.guided.sum())
        self._stats = stats if self._stats is None else self._stats + stats
        self._corrected = corrected if self._corrected is None else self._corrected + corrected
        if observer is not None:
            self._observed = observer.totals()

    def coverage(self) -> float:
        """Share of rows that were guided so far. The sites of a plan are recorded together, so it is theirs too."""
        return self._guided / max(self._rows, 1.0)

    def metrics(self) -> dict[str, float]:
        """Scalars for the journal."""
        out = mismatch_metrics(np.concatenate(self._deltas))
        out |= {"entropy": self._entropy / max(self._tokens, 1.0), "loss": self._loss, "train/tokens": self._tokens}
        if self._stats is not None and self._corrected is not None:
            out |= self._stats.metrics() | self._corrected.metrics()
        if self._has_guidance:
            out["guidance/coverage"] = self.coverage()
        for key in ("flip_rate", "scale_mismatch"):
            if key in self._observed:
                out[f"guidance/{key}"] = self._observed[key]
        return out


def _split(examples: Sequence[Example], parts: int) -> list[list[Example]]:
    """Consecutive parts with about equally many examples; empty ones are left out."""
    size, rest = divmod(len(examples), parts)
    out, start = [], 0
    for i in range(parts):
        stop = start + size + (i < rest)
        if stop > start:
            out.append(list(examples[start:stop]))
        start = stop
    return out
