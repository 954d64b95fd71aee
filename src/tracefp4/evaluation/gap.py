"""The gap of two paths: log-probabilities of the same tokens, computed by the rollout and by the trainer.

``score`` runs a trainer forward over finished rollouts and returns, for every response token,
``delta = log p_train - log p_rollout``. Nothing is trained. The same rollouts are scored by several trainers (BF16,
QAT, guided by this plan or that), so their rows differ in the trainer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from tracefp4.core import Rollout
from tracefp4.guidance.record import Record
from tracefp4.training.batch import Example, collate, plan_micro_batches
from tracefp4.training.observe import Observer
from tracefp4.training.policy import token_logprobs
from tracefp4.training.pulls import PullCounts
from tracefp4.training.sites import TrainerSites


@dataclass(slots=True)
class Scored:
    """Deltas of one trainer on a list of rollouts, and what was counted at its sites."""

    deltas: list[np.ndarray]
    """One float64 array of response tokens for each rollout, in the caller's order."""
    entropies: list[np.ndarray]
    observer: Observer = field(default_factory=Observer)
    scale_check_failures: float | None = None
    """Share of checked chunks whose congruent scales were restored wrongly."""
    pulled: PullCounts | None = None
    """What was pulled of checked sites."""
    rows: int = 0
    """Rows of all rollouts."""

    @property
    def pulled_bytes_per_token(self) -> float:
        """Bytes of bits that were pulled, a row; 0 without checked sites."""
        return 0.0 if self.pulled is None else self.pulled.pulled_bytes / max(self.rows, 1)

    @property
    def all(self) -> np.ndarray:
        """Deltas of all tokens."""
        return np.concatenate(self.deltas)


@torch.no_grad()
def score(
    model: nn.Module,
    sites: TrainerSites,
    rollouts: Sequence[Rollout],
    *,
    guidance: Sequence[Record] | None = None,
    truth: Sequence[Record] | None = None,
    replay: bool = True,
    temperature: float = 1.0,
    micro_tokens: int = 16384,
    progress: Callable[[int], None] | None = None,
    observer: Observer | None = None,
) -> Scored:
    """Score rollouts with a trainer.

    Args:
        model: bound to ``sites``.
        sites: the trainer's site objects.
        rollouts: finished rollouts.
        guidance: one record a rollout to be guided by; ``None`` for an unguided trainer.
        truth: one record a rollout with the whole codes, to count flips and wrong codes against.
        replay: use the rollouts' expert routes.
        temperature: the rollouts' temperature.
        micro_tokens: padded rows a forward.
        progress: called with the number of rollouts done.
        observer: counts something else than the usual, where there is a ``truth``.
    """
    device = next(model.parameters()).device
    examples = [_example(i, r, guidance[i] if guidance else None) for i, r in enumerate(rollouts)]
    out = Scored([np.empty(0)] * len(rollouts), [np.empty(0)] * len(rollouts), observer or Observer())
    out.rows = sum(rollout.rows for rollout in rollouts)
    done = 0
    for group in plan_micro_batches(examples, micro_tokens):
        batch = collate(group, device)
        if truth is not None:
            known = collate([_example(e.index, rollouts[e.index], truth[e.index]) for e in group], device)
            out.observer.truth = known.guidance
        seeing = out.observer if truth is not None else None
        with sites.batch(batch, guided=guidance is not None, replay=replay, observer=seeing):
            logprobs, entropy = token_logprobs(model, batch, temperature)
        delta = (logprobs.double() - batch.rollout_logprobs.double()).cpu().numpy()
        mask, entropies = batch.response.cpu().numpy(), entropy.cpu().numpy()
        for row, index in enumerate(batch.index):
            out.deltas[index] = delta[row][mask[row]]
            out.entropies[index] = entropies[row][mask[row]]
        done += len(group)
        if progress is not None:
            progress(done)
    out.scale_check_failures, out.pulled = sites.checks.take(), sites.pulled.take()
    return out


def _example(index: int, rollout: Rollout, record: Record | None) -> Example:
    return Example(
        tokens=rollout.tokens,
        prompt_length=len(rollout.prompt_ids),
        rollout_logprobs=rollout.logprobs,
        index=index,
        record=record,
        routes=rollout.routes,
    )
