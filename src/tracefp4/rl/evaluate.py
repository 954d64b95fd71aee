"""Evaluation of a policy as it is deployed: the engine samples, the task scores, nothing is guided.

Guided log-probabilities are not a property of the policy, so evaluation never uses guidance; the engine's own spec says
whether this is the FP4 policy or the BF16 one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracefp4.core import Rollout, SamplingParams
from tracefp4.rl.collect import make_requests, score
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.statistics import Interval, mean_bootstrap, wilson
from tracefp4.rl.tasks import Task, TaskItem
from tracefp4.rollout.engine import Engine
from tracefp4.training.ranks import ALONE, Ranks


@dataclass(slots=True)
class Evaluation:
    """Scores of every sample."""

    items: list[TaskItem]
    """This rank's, as ``rollouts`` and ``texts`` are."""
    rollouts: list[Rollout]
    texts: list[str]
    scores: np.ndarray
    """``(items, samples)`` float64, of all ranks."""
    lengths: np.ndarray
    """Response tokens of every sample, float64, of all ranks."""

    def mean(self) -> Interval:
        """Mean score (pass@1 where scores are 0 or 1) with an interval over items.

        One sample an item that is right or wrong is an independent trial: then the interval is Wilson's, which does not
        shrink to nothing when all are wrong. Otherwise items are resampled.
        """
        scores = self.scores
        if scores.shape[1] == 1 and np.isin(scores, (0.0, 1.0)).all():
            return wilson(int(scores.sum()), len(scores))
        return mean_bootstrap(scores.mean(axis=1))

    def by_item(self) -> list[float]:
        """Mean score of each item over its samples."""
        return [round(float(score), 6) for score in self.scores.mean(axis=1)]

    def metrics(self, task: str) -> dict[str, object]:
        """Scalars for the journal."""
        found = self.mean()
        return {
            f"eval/{task}/pass@1": found.estimate,
            f"eval/{task}/pass@1_ci": [found.low, found.high],
            f"eval/{task}/response_length": float(np.mean(self.lengths)),
        }


def evaluate(
    engine: Engine,
    task: Task,
    prompter: Prompter,
    *,
    items: int,
    samples: int,
    sampling: SamplingParams,
    seed: int,
    decode: Callable[[Sequence[int]], str],
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Sample held-out items and score them.

    Args:
        engine: synced with the weights to evaluate.
        task: gives items of the split ``eval``, the same for every run of one task and seed.
        prompter: renders prompts.
        items: how many items.
        samples: samples of each.
        sampling: temperature, lengths, truncation.
        seed: sampling seed.
        decode: token ids to text.
        ranks: each samples its share of the items.
    """
    share = ranks.share(items)
    chosen = task.items("eval", items, 0)[share]
    requests = make_requests(chosen, prompter, replace(sampling, seed=None), samples, seed, "eval", share.start)
    rollouts = engine.generate(requests, guidance=False)
    repeated = [item for item in chosen for _ in range(samples)]
    texts, scores = score(rollouts, repeated, task, decode)
    every = ranks.gather_array(scores.double().numpy()).reshape(-1, samples)
    lengths = ranks.gather_array(np.array([len(r.response_ids) for r in rollouts], dtype=np.float64))
    return Evaluation(repeated, list(rollouts), texts, every, lengths)
