"""Score centering: subtract what the gradient would be if the sampled token did not matter.

The policy gradient on samples of another policy ``q`` is ``E_q[A grad log p_y]``. Even with a constant advantage it is
not zero: ``E_q[grad log p_y] = sum_v q_v grad log p_v`` pulls ``p`` towards ``q``, and at every sync that drift
compounds. Score centering (Marek and Ryabinin, arXiv 2609.20807) subtracts it. The sum needs the sampler's whole
distribution; its ``k`` likeliest tokens, the *head* ``H``, are known, and the tail is modelled as ``q_v ~ rho p_v``
with ``rho = (1 - sum_H q) / (1 - sum_H p)``. As ``sum_v p_v grad log p_v = 0``, the tail folds into the head:

    C_t = sum_H sg(q_v - rho p_v) log p_v                                      alone
    C_t = sum_H sg(m_v - alpha p_v) log p_v,  m_v = min(p_v, cap q_v),          with truncated importance sampling
          alpha = min(1, cap rho)

and the loss of a token is ``-A (w log p_y - C_t)``, ``w`` its importance weight (1, or ``min(p_y / q_y, cap)``). The
base loss is ``reinforce``, without PPO clipping. ``sg`` stops the gradient. The paper keeps ``k = 128`` (over 99.9 % of
the mass); the floor under the two tails is torchtitan's (``ScoreCenteringLoss``). ``q`` has to be the distribution that
was sampled from: temperature, but no top-k and no top-p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.config import Config
from tracefp4.errors import ConfigError

TAIL_FLOOR = 1e-6
"""Smallest probability of a tail; below it two rounding errors would be divided by each other."""


def centering_term(top_logprobs: Tensor, rollout_top: Tensor, cap: float | None = None) -> Tensor:
    """``C_t`` of each position.

    Args:
        top_logprobs: ``(..., k)`` float32 log-probs of the trainer's policy at the head's tokens, with gradient.
        rollout_top: ``(..., k)`` float32, the sampler's.
        cap: of truncated importance sampling; ``None`` without it.

    Returns:
        ``(...)`` float32 with gradient.
    """
    with torch.no_grad():
        p, q = top_logprobs.exp(), rollout_top.exp()
        tail_q, tail_p = ((1 - x.sum(-1, keepdim=True)).clamp_min(TAIL_FLOOR) for x in (q, p))
        rho = tail_q / tail_p
        score = q - rho * p if cap is None else torch.minimum(p, cap * q) - (cap * rho).clamp_max(1.0) * p
    return (score * top_logprobs).sum(-1)


def check_centering(config: Config) -> None:
    """Refuse corrections whose expected score is not the formula above.

    Raises:
        ConfigError: with the corrections that fit.
    """
    correction = config.correction
    fits = correction.name in ("none", "tis") and correction.level == "token" and not correction.reject
    if config.loss.score_centering and not fits:
        raise ConfigError(
            "loss.score_centering knows the expected score without a correction and under token-level tis; set "
            "correction.name to 'none' or 'tis', correction.level = 'token' and correction.reject = ''"
        )
    if config.loss.score_centering and config.loss.name != "reinforce":
        raise ConfigError(
            f"loss.score_centering centres the score of the current policy: set loss.name = 'reinforce', not "
            f"{config.loss.name!r}"
        )
