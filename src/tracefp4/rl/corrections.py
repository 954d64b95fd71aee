"""Off-policy corrections: weights for tokens that one policy sampled and another one trains on.

Even on the first update the rollout's distribution ``q`` and the trainer's ``p_old`` differ by their arithmetic. The
gradient of an expectation under ``p_old``, taken with samples of ``q``, needs the weight ``rho = p_old / q``. That
weight has no upper bound, so *truncated importance sampling* (Ionides, 2008; for this mismatch Yao et al., *Your
efficient RL framework secretly brings you off-policy RL training*, 2025) uses ``min(rho, C)``: a small bias for a
bounded variance.

A correction is one function of the log-ratio, registered in :data:`CORRECTIONS`. It gets ``log rho (B, S)``, already
clamped to +-20 and 0 outside the mask, and returns weights ``(B, S)``; a weight of 0 rejects a token. Sequence-level
rules sum or average the log-ratio over the mask first; IcePop keeps ``rho`` inside a band and returns 0 outside it.
Weights carry no gradient and never change the denominators of the loss.

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

LOG_RATIO_LIMIT = 20.0
"""Clamp of the log-ratio before ``exp``, as in verl's rollout correction."""


@dataclass(frozen=True, slots=True)
class CorrectionStats:
    """Sums over response tokens, on the device; add those of all micro-batches, then read :meth:`metrics`."""

    tokens: Tensor
    changed: Tensor
    """Tokens whose weight the rule made different from their ratio: truncated or rejected."""
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
        tokens, changed, total, squares, largest = raw
        tokens = max(tokens, 1.0)
        return {
            "correction/weight_mean": total / tokens,
            "correction/changed_frac": changed / tokens,
            "correction/ess": total * total / (squares * tokens) if squares > 0 else 0.0,
            "correction/ratio_max": largest,
        }


Rule = Callable[[Tensor, Tensor, CorrectionConfig], Tensor]
"""``(log_ratio (B, S), mask (B, S), config) -> weights (B, S)``."""


def uncorrected(log_ratio: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """Every token weighs 1."""
    return torch.ones_like(log_ratio)


def truncated(log_ratio: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """Token-level truncated importance sampling: ``min(rho, cap)``."""
    return log_ratio.exp().clamp_max(config.cap)


CORRECTIONS: dict[str, Rule] = {"none": uncorrected, "tis": truncated}
"""Corrections by name."""


@torch.no_grad()
def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: CorrectionConfig
) -> tuple[Tensor, CorrectionStats]:
    """Weights of the policy term.

    Args:
        old_logprobs: ``(B, S)`` float32, the trainer's log-probs of the rollout tokens before the first update.
        rollout_logprobs: ``(B, S)`` float32, the engine's, at the same temperature.
        mask: ``(B, S)`` true on response tokens; whatever stands elsewhere is not read.
        config: name and parameters.

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
    weights = torch.where(mask, CORRECTIONS[config.name](log_ratio, mask, config), 0.0)
    ratio = torch.where(mask, log_ratio.exp(), 0.0)
    changed = (weights != ratio).sum() if config.name != "none" else torch.zeros((), device=mask.device)
    stats = CorrectionStats(
        tokens=mask.sum().float(),
        changed=changed.float(),
        weight_sum=weights.sum(),
        weight_square_sum=weights.square().sum(),
        ratio_max=ratio.amax() if ratio.numel() else torch.zeros((), device=ratio.device),
    )
    return weights, stats
