"""Training on one batch of experience.

Each micro-batch loads its own guidance by handle (on a GPU, while the one before it trains), runs one guided forward,
and its loss is already divided by the denominators of the whole optimizer step. With one optimizer step a batch, the
old log-probs *are* those of the update's own forward; with more, a guided forward without gradient computes them first,
in the micro-batches of the update: the same rows beside the same padding, so that the ratio of the first optimizer step
is 1 to the last bit (beside CUDA graphs, which pad to sizes of their own, to within rounding). The mismatch of a step
is that of the first forward, before any update.

Of several ranks each trains on its own examples. Denominators and metrics are those of all; the number of micro-batches
is the largest of any rank, because every forward and backward is collective, and a rank that has fewer adds empty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tracefp4.config import Config
from tracefp4.core import Handle, Rollout
from tracefp4.errors import EngineError, GuidanceMissing
from tracefp4.guidance.frame import Expectation, decode
from tracefp4.guidance.header import checksum_of
from tracefp4.guidance.record import Record
from tracefp4.guidance.store import Source, Store
from tracefp4.guidance.workers import side_by_side
from tracefp4.rl.centering import centering_term
from tracefp4.rl.clipping import BYPASS
from tracefp4.rl.corrections import CorrectionStats, correction_weights
from tracefp4.rl.losses import Denominators, LossStats, policy_loss
from tracefp4.rl.metrics import mismatch_metrics, token_deltas, token_positions
from tracefp4.training.ahead import ahead
from tracefp4.training.batch import Example, MicroBatch, collate, filler, plan_micro_batches
from tracefp4.training.graphs import DecoderGraphs, padded_width, refusal
from tracefp4.training.observe import Observer
from tracefp4.training.optimizer import MasterAdamW
from tracefp4.training.policy import TokenScores, score_tokens, spread, token_logprobs
from tracefp4.training.ranks import ALONE, Ranks
from tracefp4.training.sites import TrainerSites

Loader = Callable[[Sequence[Example]], Sequence[Record | None]]
"""Reads the guidance of the examples of a micro-batch."""


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

    def __call__(self, examples: Sequence[Example]) -> list[Record]:
        """The records of examples; raises a :class:`~tracefp4.errors.GuidanceError` when one is absent or wrong.

        Claiming, writing and hashing frames go on side by side. Headers are read one after the other: that is work of
        Python's own, which threads would only hand to and fro.
        """
        handles = [self.handle(example) for example in examples]
        fetched = side_by_side([partial(self._fetch, handle) for handle in handles])
        records = []
        for example, handle, (frame, checksum) in zip(examples, handles, fetched, strict=True):
            record = decode(frame, replace(self.expect, tokens=example.tokens), checksum=checksum)
            record.source = Source(self.store.pull, handle)
            records.append(record)
        return records

    def _fetch(self, handle: Handle) -> tuple[memoryview, bytes]:
        frame = self.store.get(handle)
        return frame, checksum_of(frame)

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
        ranks: the processes that train the model together; it is sharded if there are several.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: TrainerSites,
        optimizer: MasterAdamW,
        config: Config,
        reference: Callable[[MicroBatch], Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.sites, self.optimizer, self.config = model, sites, optimizer, config
        self._reference, self._ranks = reference, ranks
        self._device = next(model.parameters()).device
        self._graphs = _graphs(model, sites, config, ranks)

    def update(self, examples: Sequence[Example], load: Loader | None, measure_unguided: bool) -> dict[str, float]:
        """Run the optimizer steps of one batch.

        Args:
            examples: everything of this rank that trains, of whole groups.
            load: reads guidance; ``None`` without.
            measure_unguided: also measure the mismatch of the same batch without guidance, before the update, flip
                rates, and the mismatch by position.

        Returns:
            Metrics of the batch of all ranks; flip rates are those of this rank's micro-batch.

        Raises:
            GuidanceMissing: fewer rows are guided than ``train.min_coverage`` asks for. The optimizer step that would
                have trained on them was not applied.
        """
        self.model.train()
        metrics = self._unguided(examples) if measure_unguided and load is not None else {}
        steps = _split(examples, self.config.train.minibatches, self._ranks)
        old = self._old_logprobs(steps, load) if len(steps) > 1 else None
        tally = Tally(old, self._ranks, by_position=measure_unguided)
        norms = []
        for part in steps:
            self._accumulate(part, load, tally, measure_unguided)
            if load is not None:
                self._check_coverage(tally)
            norms.append(self.optimizer.step())
            self.sites.weights.renew()
        metrics |= tally.metrics()
        failed = self.sites.checks.take(self._ranks)
        if failed is not None:
            metrics["guidance/scale_check_failures"] = failed
        pulled = self.sites.pulled.take(self._ranks)
        if pulled is not None:
            metrics["guidance/pulled_share"] = pulled.share
        metrics["grad_norm"] = float(np.mean(norms))
        metrics["lr"] = self.optimizer.learning_rate()
        return metrics

    def _accumulate(
        self, examples: Sequence[Example], load: Loader | None, tally: Tally, observe: bool = False
    ) -> None:
        config = self.config
        lengths = [len(e.tokens) - e.prompt_length for e in examples]
        denominators = Denominators.of(lengths, config.sampling.max_new_tokens, self._ranks)
        if self._graphs is not None:
            self._graphs.renew()
        for batch in self._batches(examples, load):
            if not batch.index:
                self._accompany(batch)
                continue
            observer = self._observer(batch, tally) if observe else None
            with self.sites.batch(batch, observer=observer):
                scored = score_tokens(self.model, batch, config.sampling.temperature, graphs=self._graphs)
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
            tally.add(batch, logprobs.detach(), scored.entropy, loss.detach(), stats, corrected)

    def _observer(self, batch: MicroBatch, tally: Tally) -> Observer | None:
        """Who counts flip rates in the pass that trains, if somebody is to.

        An observer wants codes, which graphs do not write. If a pass that trains went without them to show codes, its
        last bits would differ, and a run would depend on how often it is measured. So beside graphs, which only a
        trainer alone has, they are counted in a pass of their own.
        """
        if not tally.wants_observation(batch):
            return None
        observer = tally.observed()
        if self._graphs is None:
            return observer
        apart = self.sites.standing_in(batch.guidance, batch.routes)  # checks of scales count once
        with torch.no_grad(), self.sites.batch(batch, observer=observer), apart:
            token_logprobs(self.model, batch, self.config.sampling.temperature)
        return None

    def _accompany(self, batch: MicroBatch) -> None:
        """Forward and backward of an empty micro-batch, beside the other ranks; it has no share of the gradient."""
        with self.sites.batch(batch):
            (0.0 * score_tokens(self.model, batch, self.config.sampling.temperature).logprobs.sum()).backward()
        self.optimizer.collect()

    def _centering(self, batch: MicroBatch, scored: TokenScores) -> Tensor | None:
        """The expected score of the sampler at each response token, ``(B, S)``."""
        config = self.config
        if not config.loss.score_centering:
            return None
        if batch.top is None or scored.top is None:
            raise EngineError("loss.score_centering needs the sampler's top log-probs, and the rollouts carry none")
        cap = config.correction.cap if config.correction.name == "tis" else None
        term = centering_term(scored.top, batch.top.logprobs, cap)
        return spread(term, batch)

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
        found: dict[int, Tensor] = {}
        for part in steps:
            for batch in self._batches(part, load):
                logprobs = self._forward(batch, guided=True)
                for b, index in enumerate(batch.index):  # none, of an empty micro-batch
                    found[index] = logprobs[b, : batch.lengths[b]]
        return found

    @torch.no_grad()
    def _unguided(self, examples: Sequence[Example]) -> dict[str, float]:
        deltas, positions = [], []
        for batch in self._batches(examples, None):
            logprobs = self._forward(batch, guided=False)
            if batch.index:
                deltas.append(token_deltas(logprobs, batch.rollout_logprobs, batch.places))
                positions.append(token_positions(batch.response, batch.places))
        return mismatch_metrics(_of_all(deltas, self._ranks), "_unguided", _of_all(positions, self._ranks))

    def _forward(self, batch: MicroBatch, guided: bool) -> Tensor:
        with self.sites.batch(batch, guided=guided):
            return token_logprobs(self.model, batch, self.config.sampling.temperature)[0]

    def _batches(self, examples: Sequence[Example], load: Loader | None):
        width = None if self._graphs is None else padded_width
        groups = plan_micro_batches(examples, self.config.train.micro_tokens, width)
        missing = self._ranks.most(len(groups)) - len(groups)
        yield from ahead((partial(_micro_batch, group, load, self._device) for group in groups), self._device)
        for _ in range(missing):
            yield filler(self._device)


def _graphs(model: nn.Module, sites: TrainerSites, config: Config, ranks: Ranks) -> DecoderGraphs | None:
    """The decoder as CUDA graphs, where that is wanted and possible."""
    train = config.train
    if not train.cuda_graphs or train.gradient_checkpointing or ranks.size > 1 or refusal(model, sites):
        return None
    return DecoderGraphs(model, sites, train.micro_tokens)


def _of_all(parts: Sequence[Tensor], ranks: Ranks) -> np.ndarray:
    """A number for each response token of the batch, float64, rank by rank."""
    return ranks.gather_array(torch.cat(list(parts)).cpu().numpy() if parts else np.empty(0))


def _micro_batch(group: Sequence[Example], load: Loader | None, device: torch.device) -> MicroBatch:
    """Read guidance and collate."""
    if load is not None:
        records = load(group)
        group = [replace(example, record=record) for example, record in zip(group, records, strict=True)]
    return collate(group, device)


class Tally:
    """Sums of a batch of experience over its micro-batches and, when they are read, over the ranks.

    What lies on the device stays there until the metrics are read: a GPU is kept waiting by whoever looks at a number.
    """

    def __init__(self, old: dict[int, Tensor] | None, ranks: Ranks = ALONE, by_position: bool = False) -> None:
        self._old, self._ranks, self._by_position = old, ranks, by_position
        self._deltas: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._tokens = self._guided = self._rows = 0.0
        self._has_guidance = False
        self._stats: LossStats | None = None
        self._corrected: CorrectionStats | None = None
        self._observer: Observer | None = None

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
        """Flip rates are counted on the first guided micro-batch only: they cost a second quantization or a pass."""
        return batch.guidance is not None and self._observer is None

    def observed(self) -> Observer:
        """A new observer, whose counts are part of the metrics."""
        self._observer = Observer()
        return self._observer

    def add(
        self,
        batch: MicroBatch,
        logprobs: Tensor,
        entropy: Tensor,
        loss: Tensor,
        stats: LossStats,
        corrected: CorrectionStats,
    ) -> None:
        """Add one micro-batch."""
        before = self.old(batch, logprobs)
        self._deltas.append(token_deltas(before, batch.rollout_logprobs, batch.places))
        if self._by_position:
            self._positions.append(token_positions(batch.response, batch.places))
        self._tokens += batch.places.numel()
        self._sums.append(torch.stack([entropy.sum(), loss]))
        self._rows += sum(batch.lengths)
        if batch.guidance is not None:
            self._has_guidance = True
            self._guided += batch.guidance.count
        self._stats = stats if self._stats is None else self._stats + stats
        self._corrected = corrected if self._corrected is None else self._corrected + corrected

    def coverage(self) -> float:
        """Share of rows that were guided so far. The sites of a plan are recorded together, so it is theirs too."""
        guided, rows = self._ranks.sum([self._guided, self._rows])
        return guided / max(rows, 1.0)

    def metrics(self) -> dict[str, float]:
        """Scalars for the journal."""
        positions = _of_all(self._positions, self._ranks) if self._by_position else None
        out = mismatch_metrics(_of_all(self._deltas, self._ranks), positions=positions)
        sums = torch.stack(self._sums).double().sum(0).tolist() if self._sums else [0.0, 0.0]
        entropy, tokens, loss = self._ranks.sum([sums[0], self._tokens, sums[1]])
        out |= {"entropy": entropy / max(tokens, 1.0), "loss": loss, "train/tokens": tokens}
        out |= _over_ranks(LossStats, self._stats, self._ranks).metrics()
        out |= _over_ranks(CorrectionStats, self._corrected, self._ranks).metrics()
        coverage = self.coverage()
        if self._ranks.any(self._has_guidance):
            out["guidance/coverage"] = coverage
        observed = {} if self._observer is None else self._observer.totals()
        for key in ("flip_rate", "scale_mismatch"):
            if key in observed:
                out[f"guidance/{key}"] = observed[key]
        return out


_Stats = TypeVar("_Stats", LossStats, CorrectionStats)


def _over_ranks(kind: type[_Stats], stats: _Stats | None, ranks: Ranks) -> _Stats:
    """Statistics of all ranks; a rank that trained nothing has none."""
    if ranks.size == 1 and stats is not None:
        return stats
    names = list(kind.__slots__)
    values = [0.0] * len(names)
    if stats is not None:
        values = torch.stack([getattr(stats, name).double() for name in names]).tolist()
    columns = zip(names, zip(*ranks.gather(values), strict=True), strict=True)
    return kind(**{name: torch.tensor((max if name == "ratio_max" else sum)(column)) for name, column in columns})


def _split(examples: Sequence[Example], parts: int, ranks: Ranks = ALONE) -> list[list[Example]]:
    """Consecutive parts with about equally many examples; those that are empty on every rank are left out."""
    size, rest = divmod(len(examples), parts)
    filled = ranks.most(min(len(examples), parts))
    starts = [i * size + min(i, rest) for i in range(filled + 1)]
    return [list(examples[start:stop]) for start, stop in pairwise(starts)]
