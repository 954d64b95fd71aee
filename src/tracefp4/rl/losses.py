"""The policy-gradient loss: how far may one batch of rollouts move the policy?

With ``r = pi_theta / pi_old`` for each response token and the advantage ``A`` of its sample, PPO (Schulman et al.,
arXiv 1707.06347) and GRPO (arXiv 2402.03300) minimise

    max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A)

so a token whose ratio has already moved in the good direction by more than the clip range gets no gradient. For
``A < 0`` and a huge ratio that maximum is unbounded; *dual clip* (Ye et al., arXiv 1912.09729) caps it at ``-c A``.
DAPO (arXiv 2503.14476) is the same loss with ``eps_high = 0.28``, averaged over tokens, without a KL term. GSPO (Zheng
et al., arXiv 2507.18071) uses one ratio a sequence, ``s = exp(mean_t log r_t)``, with clip ranges near 3e-4; its dual
clip is off. The other losses, and what each makes of the ratio, are in :mod:`tracefp4.rl.clipping`.

An optional term ``beta * k3`` holds the policy near a reference: with ``d = log pi_ref - log pi_theta``,
``k3 = exp(d) - 1 - d`` (Schulman, *Approximating KL divergence*, 2020).

**Aggregation.** With token losses ``l[i, t]``, response lengths ``n_i``, ``N`` sequences and ``T`` tokens,

    token-mean               sum l / T
    seq-mean-token-sum       sum_i (sum_t l) / N
    seq-mean-token-mean      sum_i (sum_t l / n_i) / N
    seq-mean-token-sum-norm  sum_i (sum_t l) / (N * norm_length)

``T``, ``N`` and ``norm_length`` are those of the *whole* optimizer step (:class:`Denominators`), not of the
micro-batch at hand. The losses of the micro-batches then add up to the loss of the batch, however it was split and on
however many ranks; averaging the means of micro-batches would not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.config import LossConfig
from tracefp4.errors import ConfigError, TaskError, suggest
from tracefp4.rl.clipping import CLIPPINGS, Terms
from tracefp4.training.ranks import ALONE, Ranks

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before ``exp`` (as in verl): e^20 is 5e8, and float32 overflows at 88."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the token losses of a whole optimizer step are divided by, over all micro-batches and ranks."""

    tokens: float
    sequences: float
    norm_length: float = 0.0
    """Constant of ``seq-mean-token-sum-norm``: the response length limit (Dr. GRPO, arXiv 2503.20783)."""

    def __post_init__(self) -> None:
        if self.tokens <= 0 or self.sequences <= 0:
            raise TaskError("an optimizer step needs at least one response token: every sample was dropped or empty")

    @classmethod
    def of(cls, lengths: Sequence[int], norm_length: int = 0, ranks: Ranks = ALONE) -> Denominators:
        """From the response lengths of all this rank's samples of the step; empty responses count for nothing."""
        tokens, sequences = ranks.sum([float(sum(lengths)), float(sum(n > 0 for n in lengths))])
        return cls(tokens, sequences, float(norm_length))


@dataclass(frozen=True, slots=True)
class LossStats:
    """Detached sums over response tokens, on the device; add those of all micro-batches, then call :meth:`metrics`."""

    tokens: Tensor
    clip_low: Tensor
    """Tokens whose gradient the lower bound stopped (A < 0 and r < 1 - eps_low)."""
    clip_high: Tensor
    """Tokens whose gradient the upper bound stopped (A > 0 and r > 1 + eps_high)."""
    clip_dual: Tensor
    """Tokens on which dual clip acted."""
    ratio_sum: Tensor
    ratio_max: Tensor
    kl_sum: Tensor
    """k3 against the reference; 0 without one."""

    def __add__(self, other: LossStats) -> LossStats:
        names = self.__slots__
        both = {name: getattr(self, name) + getattr(other, name) for name in names if name != "ratio_max"}
        return LossStats(**both, ratio_max=torch.maximum(self.ratio_max, other.ratio_max))

    def metrics(self) -> dict[str, float]:
        """Scalars for the journal. This reads the device, once."""
        raw = torch.stack([getattr(self, name).double() for name in self.__slots__]).tolist()
        value = dict(zip(self.__slots__, raw, strict=True))
        n = max(value["tokens"], 1.0)
        return {
            "clip_frac": (value["clip_low"] + value["clip_high"]) / n,
            "clip_frac/low": value["clip_low"] / n,
            "clip_frac/high": value["clip_high"] / n,
            "clip_frac/dual": value["clip_dual"] / n,
            "ratio/mean": value["ratio_sum"] / n,
            "ratio/max": value["ratio_max"],
            "kl_reference/mean": value["kl_sum"] / n,
        }


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominators: Denominators,
    config: LossConfig,
    *,
    weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    centering: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """Loss of one micro-batch, already divided by the denominators of the whole step.

    Args:
        logprobs: ``(B, S)`` float32 log-probs of the policy being trained, with gradient.
        old_logprobs: ``(B, S)`` float32 log-probs when the rollouts were made, as the trainer computes them.
        advantages: ``(B,)`` one a sample, or ``(B, S)`` one a token; float32.
        mask: ``(B, S)`` true on response tokens. Whatever stands elsewhere in the other tensors is not read.
        denominators: of the whole optimizer step.
        config: loss name, clip ranges, dual clip, KL weight, aggregation.
        weights: ``(B, S)`` correction weights (:mod:`tracefp4.rl.corrections`); ``None`` for 1. They multiply the
            policy term, not the KL term.
        ref_logprobs: ``(B, S)`` float32 log-probs of the reference policy; needed if ``config.kl`` is not 0.
        centering: ``(B, S)`` float32 from :func:`tracefp4.rl.centering.centering_term`, with gradient; times the
            advantage it is added to the policy term.

    Returns:
        ``(loss, stats)``: a scalar whose sum over micro-batches is the loss of the step, and detached sums.

    Raises:
        ConfigError: unknown loss, a KL weight without a reference, or shapes that differ.
    """
    mask = mask.bool()
    old_logprobs = old_logprobs.detach()
    if logprobs.shape != mask.shape or old_logprobs.shape != mask.shape:
        shapes = tuple(logprobs.shape), tuple(old_logprobs.shape), tuple(mask.shape)
        raise ConfigError(f"log-probs {shapes[0]}, old log-probs {shapes[1]} and mask {shapes[2]} must have one shape")
    if config.name not in LOG_RATIOS:
        raise ConfigError(f"unknown loss {config.name!r}{suggest(config.name, LOG_RATIOS)}")
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(logprobs)
    advantages = torch.where(mask, advantages, 0.0)
    # Clean before any arithmetic: NaN at a masked place would reach the gradient as 0 * NaN.
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, old_logprobs, 0.0)
    ratio = LOG_RATIOS[config.name](difference, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    losses, clipped = CLIPPINGS[config.name](Terms(ratio, torch.where(mask, logprobs, 0.0), advantages), config)
    if weights is not None:
        losses = losses * torch.where(mask, weights.detach(), 0.0)
    if centering is not None:
        losses = losses + advantages * torch.where(mask, centering, 0.0)
    kl = None
    if config.kl > 0:
        if ref_logprobs is None:
            raise ConfigError(f"loss.kl is {config.kl}, but there are no log-probs of a reference policy")
        kl = reference_kl(logprobs, ref_logprobs, mask)
        losses = losses + config.kl * kl
    return aggregate(losses, mask, denominators, config.aggregation), _stats(ratio.detach(), mask, clipped, kl)


def token_log_ratio(difference: Tensor, mask: Tensor) -> Tensor:
    """GRPO and PPO: each token its own ratio. ``difference`` is ``(B, S)``, 0 outside ``mask``."""
    return difference


def sequence_log_ratio(difference: Tensor, mask: Tensor) -> Tensor:
    """GSPO: the mean log-ratio of the sequence as value, the token's own log-prob as gradient.

    The value is ``(B, S)`` and constant along a response. As every token carries its own gradient, a correction weight
    acts on its token alone; without weights the gradient is that of the sequence loss (GSPO, section 4.3).
    """
    mean = (difference.sum(-1) / mask.sum(-1).clamp_min(1)).detach()
    return torch.where(mask, mean[:, None] + difference - difference.detach(), 0.0)


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": token_log_ratio,
    "dapo": token_log_ratio,
    "gspo": sequence_log_ratio,
    "cispo": token_log_ratio,
    "reinforce": token_log_ratio,
    "tbpo": sequence_log_ratio,
}
"""By loss name: ``(difference, mask) -> log-ratio``. What is made of the ratio is in :mod:`tracefp4.rl.clipping`."""


def reference_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k3 estimate of the KL from the policy to the reference, ``(B, S)``, 0 outside ``mask``, with gradient."""
    d = torch.where(mask, ref_logprobs.detach(), 0.0) - torch.where(mask, logprobs, 0.0)
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


def aggregate(losses: Tensor, mask: Tensor, denominators: Denominators, mode: str) -> Tensor:
    """Sum token losses ``(B, S)`` into this micro-batch's share of the step's loss (module docstring).

    Raises:
        ConfigError: unknown mode, or ``seq-mean-token-sum-norm`` without a norm length.
    """
    losses = torch.where(mask, losses, 0.0)
    if mode == "token-mean":
        return losses.sum() / denominators.tokens
    if mode == "seq-mean-token-sum":
        return losses.sum() / denominators.sequences
    if mode == "seq-mean-token-mean":
        return (losses.sum(-1) / mask.sum(-1).clamp_min(1)).sum() / denominators.sequences
    if mode == "seq-mean-token-sum-norm":
        if denominators.norm_length <= 0:
            raise ConfigError("aggregation 'seq-mean-token-sum-norm' needs a norm length (the response length limit)")
        return losses.sum() / (denominators.sequences * denominators.norm_length)
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    raise ConfigError(f"unknown aggregation {mode!r}{suggest(mode, modes)}")


def _stats(ratio: Tensor, mask: Tensor, clipped: tuple[Tensor, Tensor, Tensor], kl: Tensor | None) -> LossStats:
    low, high, dual = (flag.sum() for flag in clipped)
    inside = torch.where(mask, ratio, 0.0)
    zero = torch.zeros((), dtype=torch.float32, device=ratio.device)
    # float32 sums of up to 2^24 ones are exact; a micro-batch is smaller.
    return LossStats(
        tokens=mask.sum().float(),
        clip_low=low.float(),
        clip_high=high.float(),
        clip_dual=dual.float(),
        ratio_sum=inside.sum(),
        ratio_max=inside.amax() if inside.numel() else zero,
        kl_sum=kl.detach().sum() if kl is not None else zero,
    )
