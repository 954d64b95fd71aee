"""Off-policy corrections: weights for tokens that one policy sampled and another one trains on.

Even on the first update the rollout's distribution ``q`` and the trainer's ``p_old`` differ by their arithmetic. The
gradient of an expectation under ``p_old``, taken with samples of ``q``, needs the weight ``rho = p_old / q``. That
weight has no upper bound, so *truncated importance sampling* (Ionides, 2008; for this mismatch Yao et al., *Your
efficient RL framework secretly brings you off-policy RL training*, 2025) uses ``min(rho, C)``: a small bias for a
bounded variance.

A correction is a *level* and a *rule*. The level says whose ratio counts: the token's own, the product over its
sequence, or the geometric mean of the sequence (:data:`LEVELS`). The rule makes a weight of the ratio:

``tis``     ``min(rho, cap)``
``mis``     masked importance sampling: ``rho`` up to ``cap``, 0 above (Liu et al., *When speed kills stability*, 2025)
``icepop``  ``rho`` inside ``[low, high]``, 0 outside (Ling team, *Every step evolves*, arXiv 2510.18855)

Names follow verl's rollout correction: ``level`` is its ``rollout_is``, ``cap`` its ``rollout_is_threshold`` (2), and a
threshold of two numbers there is ``icepop`` here, with its usual 0.5 and 5. Rules that drop tokens or sequences
outright can be added (:mod:`tracefp4.rl.rejection`). A rule is registered in :data:`CORRECTIONS`; it gets
``log rho (B, S)`` of its level, clamped to +-20, and returns weights ``(B, S)``. Weights carry no gradient and never
change the denominators of the loss.

All arms of a comparison use the same correction: TRACE removes the mismatch where it arises, a correction weighs what
is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.config import CorrectionConfig
from tracefp4.errors import ConfigError, suggest
from tracefp4.rl.rejection import Seen, kept, parse_rules

LOG_RATIO_LIMIT = 20.0
"""Clamp of the log-ratio before ``exp``, as in verl's rollout correction."""


@dataclass(frozen=True, slots=True)
class CorrectionStats:
    """Sums over response tokens, on the device; add those of all micro-batches, then read :meth:`metrics`."""

    tokens: Tensor
    changed: Tensor
    """Tokens whose weight a rule made different from their ratio: truncated or rejected."""
    rejected: Tensor
    """Tokens with weight 0."""
    weight_sum: Tensor
    weight_square_sum: Tensor
    ratio_max: Tensor

    def __add__(self, other: CorrectionStats) -> CorrectionStats:
        names = [name for name in self.__slots__ if name != "ratio_max"]
        both = {name: getattr(self, name) + getattr(other, name) for name in names}
        return CorrectionStats(**both, ratio_max=torch.maximum(self.ratio_max, other.ratio_max))

    def metrics(self) -> dict[str, float]:
        """Scalars for the journal; ``ess`` is the effective sample size as a share of the tokens."""
        raw = torch.stack([getattr(self, name).double() for name in self.__slots__]).tolist()
        tokens, changed, rejected, total, squares, largest = raw
        tokens = max(tokens, 1.0)
        return {
            "correction/weight_mean": total / tokens,
            "correction/changed_frac": changed / tokens,
            "correction/rejected_frac": rejected / tokens,
            "correction/ess": total * total / (squares * tokens) if squares > 0 else 0.0,
            "correction/ratio_max": largest,
        }


Rule = Callable[[Tensor, Tensor, CorrectionConfig], Tensor]
"""``(log_ratio (B, S), mask (B, S), config) -> weights (B, S)``."""


def uncorrected(log_ratio: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """Every token weighs 1."""
    return torch.ones_like(log_ratio)


def truncated(log_ratio: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """Truncated importance sampling: ``min(rho, cap)``."""
    return log_ratio.exp().clamp_max(config.cap)


def masked(log_ratio: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """Masked importance sampling: ``rho`` up to ``cap``, 0 above."""
    ratio = log_ratio.exp()
    return torch.where(ratio <= config.cap, ratio, 0.0)


def banded(log_ratio: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """IcePop: ``rho`` inside ``[low, high]``, 0 outside."""
    ratio = log_ratio.exp()
    return torch.where((ratio >= config.low) & (ratio <= config.high), ratio, 0.0)


CORRECTIONS: dict[str, Rule] = {"none": uncorrected, "tis": truncated, "mis": masked, "icepop": banded}
"""Corrections by name."""


def token_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Each token's own."""
    return log_ratio


def sequence_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The log of the product over the sequence, at each of its tokens."""
    total = log_ratio.sum(-1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return total.expand_as(log_ratio)


def geometric_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The log of the geometric mean over the sequence, at each of its tokens."""
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
    return mean.expand_as(log_ratio)


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": token_level,
    "sequence": sequence_level,
    "geometric": geometric_level,
}
"""By name: ``(log_ratio, mask) -> log_ratio`` of the level, both ``(B, S)`` and the argument 0 outside the mask."""


@torch.no_grad()
def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    config: CorrectionConfig,
    *,
    logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
) -> tuple[Tensor, CorrectionStats]:
    """Weights of the policy term.

    Args:
        old_logprobs: ``(B, S)`` float32, the trainer's log-probs of the rollout tokens before the first update.
        rollout_logprobs: ``(B, S)`` float32, the engine's, at the same temperature.
        mask: ``(B, S)`` true on response tokens; whatever stands elsewhere is not read.
        config: name and parameters.
        logprobs: ``(B, S)`` float32, the trainer's current ones, and
        advantages: ``(B, S)`` float32; rejection rule ``opsm`` needs both.

    Returns:
        ``(weights, stats)``: weights ``(B, S)`` float32, detached, 0 outside the mask.

    Raises:
        ConfigError: unknown correction, or shapes that differ.
    """
    if config.name not in CORRECTIONS:
        raise ConfigError(f"unknown correction {config.name!r}{suggest(config.name, CORRECTIONS)}")
    if old_logprobs.shape != mask.shape or rollout_logprobs.shape != mask.shape:
        shapes = tuple(old_logprobs.shape), tuple(rollout_logprobs.shape), tuple(mask.shape)
        raise ConfigError(f"log-probs {shapes[0]} and {shapes[1]} and mask {shapes[2]} must have one shape")
    mask = mask.bool()
    log_ratio = torch.where(mask, old_logprobs.float() - rollout_logprobs.float(), 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    levelled = LEVELS[config.level](log_ratio, mask)
    weights = torch.where(mask, CORRECTIONS[config.name](levelled, mask, config), 0.0)
    plain = torch.where(mask, levelled.exp(), 0.0) if config.name != "none" else weights
    rules = parse_rules(config.reject)
    if rules:
        moved = None if logprobs is None else torch.where(mask, old_logprobs.float() - logprobs.float(), 0.0)
        seen = Seen(log_ratio, mask, moved, advantages)
        for rule in rules:
            weights = torch.where(kept(rule, seen), weights, 0.0)
    ratio = torch.where(mask, log_ratio.exp(), 0.0)
    changed = (weights != plain).sum()
    rejected = ((weights == 0) & mask).sum()
    stats = CorrectionStats(
        tokens=mask.sum().float(),
        changed=changed.float(),
        rejected=rejected.float(),
        weight_sum=weights.sum(),
        weight_square_sum=weights.square().sum(),
        ratio_max=ratio.amax() if ratio.numel() else torch.zeros((), device=ratio.device),
    )
    return weights, stats
