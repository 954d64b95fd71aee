"""One batch of experience: prompts to rollouts to rewards to examples with advantages.

The order is that of the flow: the engine generates, rewards are known, advantages follow, and what trains nothing is
dropped *before* any guidance is read. Guidance of a dropped sample is deleted where it lies, unread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from tracefp4.config import Config
from tracefp4.core import Handle, Request, Rollout, SamplingParams
from tracefp4.guidance.late_store import Shipping
from tracefp4.guidance.store import Store
from tracefp4.rl.advantages import compute_advantages
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.tasks import Task, TaskItem
from tracefp4.training.batch import Example
from tracefp4.training.ranks import ALONE, Ranks


@dataclass(slots=True)
class Experience:
    """What one step learned from its rollouts."""

    rollouts: list[Rollout]
    items: list[TaskItem]
    """The item of each rollout."""
    texts: list[str]
    rewards: torch.Tensor
    """``(B,)`` float32, before any penalty."""
    examples: list[Example]
    """Samples that train something, without guidance yet."""
    metrics: dict[str, float]

    def telling(self, group: int, most: int = 4) -> list[int]:
        """Positions of a few samples that show what was rewarded: half of them the worst, half the best.

        Args:
            group: samples a prompt; among equal rewards, those of different prompts come first.
            most: how many.
        """
        rewards = self.rewards.tolist()
        order = sorted(range(len(rewards)), key=lambda i: (rewards[i], i % group, i))
        return order if len(order) <= most else order[: most // 2] + order[most // 2 - most :]

    def handles(self) -> list[Handle]:
        """Guidance of the samples that train something; that of the others was dropped before."""
        found = [self.rollouts[example.index].guidance for example in self.examples]
        return [handle for handle in found if handle is not None]

    def sample(self, i: int, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """One sample as the journal keeps it."""
        item = self.items[i]
        return {
            "item": item.id,
            "prompt": decode(self.rollouts[i].prompt_ids),
            "answer": item.answer,
            "response": self.texts[i],
            "reward": float(self.rewards[i]),
        }


def derive_seed(*parts: object) -> int:
    """A 62-bit seed from a run's seed and whatever names the draw; equal parts give equal seeds on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def make_requests(
    items: Sequence[TaskItem],
    prompter: Prompter,
    sampling: SamplingParams,
    samples: int,
    seed: int,
    label: str,
    start: int = 0,
) -> list[Request]:
    """One request an item; its sampling seed depends on the run's seed, the label (split and step) and its position.

    Positions count from ``start``, where a rank's share of the prompts begins.
    """
    return [
        Request(
            id=f"{label}-{i}",
            prompt_ids=prompter.encode(item),
            samples=samples,
            sampling=replace(sampling, seed=derive_seed(seed, label, i)),
        )
        for i, item in enumerate(items, start)
    ]


def sampling_params(config: Config, temperature: float | None = None, top_logprobs: int = 0) -> SamplingParams:
    """The run's sampling settings; with ``top_logprobs`` the engine returns that many of each position."""
    s = config.sampling
    return SamplingParams(
        temperature=s.temperature if temperature is None else temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        max_new_tokens=s.max_new_tokens,
        top_logprobs=top_logprobs,
    )


def score(
    rollouts: Sequence[Rollout], items: Sequence[TaskItem], task: Task, decode: Callable[[Sequence[int]], str]
) -> tuple[list[str], torch.Tensor]:
    """Decode the responses and score each against its item."""
    texts = [decode(r.response_ids) for r in rollouts]
    scores = task.score_all(items, texts)
    return texts, torch.tensor(scores, dtype=torch.float32)


def digest_experience(
    rollouts: Sequence[Rollout],
    items: Sequence[TaskItem],
    texts: Sequence[str],
    rewards: torch.Tensor,
    config: Config,
    store: Store | None,
    ranks: Ranks = ALONE,
) -> Experience:
    """Turn scored rollouts into examples; drop what trains nothing, and its guidance with it.

    Args:
        rollouts: of one step, samples of a group next to each other.
        items: the item of each rollout.
        texts: decoded responses.
        rewards: ``(B,)``.
        config: group size, penalties, filters.
        store: where the guidance lies; ``None`` without guidance.
        ranks: who has the other rollouts of the step; metrics are those of all.
    """
    groups = torch.arange(len(rollouts)) // config.train.samples
    loss = config.loss
    advantages = compute_advantages(
        rewards,
        groups,
        norm_std=loss.norm_std,
        filter_groups=loss.filter_groups,
        lengths=torch.tensor([len(r.response_ids) for r in rollouts]),
        overlong_buffer=loss.overlong_buffer,
        max_length=config.sampling.max_new_tokens,
    )
    examples = []
    for i, rollout in enumerate(rollouts):
        usable = bool(advantages.keep[i]) and rollout.finish_reason != "abort" and len(rollout.response_ids) > 0
        if usable:
            examples.append(
                Example(
                    tokens=rollout.tokens,
                    prompt_length=len(rollout.prompt_ids),
                    rollout_logprobs=rollout.logprobs,
                    advantage=float(advantages.values[i]),
                    index=i,
                    routes=rollout.routes,
                    top=rollout.top if loss.score_centering else None,
                )
            )
        elif store is not None and rollout.guidance is not None:
            store.delete(rollout.guidance)
    metrics = _summary(rollouts, rewards, ranks) | ranks.merge(advantages.counts.metrics())
    return Experience(list(rollouts), list(items), list(texts), rewards, examples, metrics)


def _summary(rollouts: Sequence[Rollout], rewards: torch.Tensor, ranks: Ranks) -> dict[str, float]:
    mine = [[len(r.response_ids), r.finish_reason == "length"] for r in rollouts]
    lengths, truncated = zip(*(row for part in ranks.gather(mine) for row in part), strict=True)
    rewards = torch.from_numpy(ranks.gather_array(rewards.double().numpy())).to(rewards.dtype)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/truncated": sum(truncated) / len(truncated),
    }


def guidance_size(
    rollouts: Sequence[Rollout], values: int, shipping: Shipping, ranks: Ranks = ALONE
) -> dict[str, float]:
    """What the guidance of a batch weighs, headers and all, and how much of it travelled; empty without guidance.

    Bits that were pulled count as bytes recorded and as bytes shipped. ``guidance/saved_share`` is the share of the
    frames' bytes that never left the engine, because their rollouts trained nothing.

    Args:
        rollouts: of one step.
        values: recorded values a token, over all sites of the plan.
        shipping: what became of their frames.
        ranks: who has the other rollouts of the step, and the other frames.
    """
    recorded = [(r.rows, r.guidance.nbytes) for r in rollouts if r.guidance is not None]
    rows, size, *counts = ranks.sum(
        [sum(rows for rows, _ in recorded), sum(nbytes for _, nbytes in recorded), *astuple(shipping)]
    )
    if not rows or not values:
        return {}
    shipping = Shipping(*map(int, counts))
    size += shipping.pulled_bytes
    return {
        "guidance/bytes_per_token": size / rows,
        "guidance/bits_per_value": 8 * size / (rows * values),
        "guidance/shipped_bytes_per_token": (shipping.claimed_bytes + shipping.pulled_bytes) / rows,
        "guidance/saved_share": shipping.saved_share,
        "guidance/dropped_frames": float(shipping.dropped),
    }
