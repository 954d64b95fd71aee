"""What each loss makes of the ratio between the policy being trained and the policy that made the rollouts.

With ``r = pi_theta / pi_old`` (of a token, or of a sequence: :data:`tracefp4.rl.losses.LOG_RATIOS`), the advantage
``A`` and the clip range ``[1 - eps_low, 1 + eps_high]``, the loss of a token is

=============  =======================================================================================================
``grpo``       ``max(-r A, -clip(r) A)``, and for ``A < 0`` at most ``-dual_clip A`` (dual clip, arXiv 1912.09729)
``dapo``       the same; it differs in its defaults only (arXiv 2503.14476)
``gspo``       ``max(-r A, -clip(r) A)`` with one ratio a sequence (arXiv 2507.18071)
``cispo``      ``-sg(clip(r)) A log pi``: clipping bounds the weight of a token and never stops its gradient
               (MiniMax-M1, arXiv 2506.13585, equation 4; only the upper bound is active there: ``eps_low = 1``)
``reinforce``  ``-A log pi``: no ratio at all. What separates the policy from the rollout is left to the correction,
               which for this loss compares the *current* policy with the rollout (verl's ``bypass_mode`` with
               ``loss_type: reinforce``)
``tbpo``       the trust band of QaRL (arXiv 2604.07853): one ratio a sequence; for ``A >= 0`` as gspo, for ``A < 0``
               ``-r A`` inside the clip range and no gradient on *either* side of it, so that a sequence that has
               already been pushed out of the band, or that quantization has blown up, is left alone
=============  =======================================================================================================

``sg`` stops the gradient. The equations of ``tbpo`` are not published; this is a reconstruction from the paper's text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.config import LossConfig

Clipped = tuple[Tensor, Tensor, Tensor]
"""``(low, high, dual)`` bool ``(B, S)``: tokens that the lower bound, the upper bound and dual clip acted on."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a loss is made of, each ``(B, S)`` float32 and 0 (the ratio: 1) outside the response."""

    ratio: Tensor
    """With gradient."""
    logprobs: Tensor
    """Of the policy being trained, with gradient."""
    advantages: Tensor


Clipping = Callable[[Terms, LossConfig], tuple[Tensor, Clipped]]
"""Token losses ``(B, S)`` and what was clipped."""


def clipped_sequence(t: Terms, config: LossConfig) -> tuple[Tensor, Clipped]:
    """PPO's clipped loss without dual clip (``gspo``)."""
    plain = -t.advantages * t.ratio
    bounded = -t.advantages * t.ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    acts = bounded > plain
    flags = acts & (t.advantages < 0), acts & (t.advantages > 0), torch.zeros_like(acts)
    return torch.maximum(plain, bounded), flags


def clipped_token(t: Terms, config: LossConfig) -> tuple[Tensor, Clipped]:
    """PPO's clipped loss with dual clip (``grpo``, ``dapo``)."""
    losses, (low, high, _) = clipped_sequence(t, config)
    cap = -config.dual_clip * t.advantages
    dual = (t.advantages < 0) & (losses > cap)
    return torch.where(dual, cap, losses), (low, high, dual)


def clipped_weight(t: Terms, config: LossConfig) -> tuple[Tensor, Clipped]:
    """The clipped ratio as a weight of the log-prob (``cispo``)."""
    ratio = t.ratio.detach()
    weight = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    acts = (t.advantages != 0) & (weight != ratio)
    return -weight * t.advantages * t.logprobs, (acts & (ratio < 1), acts & (ratio > 1), torch.zeros_like(acts))


def unclipped(t: Terms, config: LossConfig) -> tuple[Tensor, Clipped]:
    """The log-prob itself (``reinforce``)."""
    none = torch.zeros_like(t.advantages, dtype=torch.bool)
    return -t.advantages * t.logprobs, (none, none, none)


def trust_band(t: Terms, config: LossConfig) -> tuple[Tensor, Clipped]:
    """The trust band (``tbpo``); ``dual`` counts tokens with ``A < 0`` that the upper end dropped."""
    losses, (_, high, _) = clipped_sequence(t, config)
    negative, ratio = t.advantages < 0, t.ratio.detach()
    low, dual = negative & (ratio < 1 - config.eps_low), negative & (ratio > 1 + config.eps_high)
    return torch.where(low | dual, losses.detach(), losses), (low, high, dual)


CLIPPINGS: dict[str, Clipping] = {
    "grpo": clipped_token,
    "dapo": clipped_token,
    "gspo": clipped_sequence,
    "cispo": clipped_weight,
    "reinforce": unclipped,
    "tbpo": trust_band,
}
"""By loss name."""

BYPASS = frozenset({"reinforce"})
"""Losses without an old policy: their correction compares the current policy with the rollout."""
