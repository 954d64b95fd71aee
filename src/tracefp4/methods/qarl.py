"""``qarl``: both sides quantize alike, and a trust band decides which samples may move the policy (arXiv 2604.07853).

QaRL quantizes as :mod:`~tracefp4.methods.qat` does. Its loss, TBPO, treats a response as one action with the
length-normalised ratios

    r = exp(mean_t log pi_theta / pi_old)      policy against old policy, both as the trainer computes them
    w = exp(mean_t log pi_old / q)             old policy against the rollout

and maximises ``E[1{w inside a band} w f(r, A)]``: ``f`` clips as PPO for ``A >= 0``, and for ``A < 0`` drops a sample
whose ``r`` is outside the clip range on either side. ``f`` is the loss ``tbpo`` (``rl/clipping.py``); the weight ``w``
with its band is the correction ``icepop`` at the level ``geometric``.

The paper's equations and ranges are not published in what could be read; this follows its prose. The clip range is
GSPO's, the band 0.5 to 2.
"""

from __future__ import annotations

from tracefp4.config import Config, CorrectionConfig, LossConfig
from tracefp4.methods.base import Method

BAND = (0.5, 2.0)
"""Where ``w`` may lie."""


class Qarl(Method):
    """FP4 on both sides, trust-band loss with its own weight of the mismatch."""

    name = "qarl"

    def settings(self, config: Config) -> Config:
        """Loss ``tbpo`` and its band, unless the run already names this loss."""
        if config.loss.name == "tbpo":
            return config
        kept = config.loss.model_dump(include={"kl", "norm_std", "filter_groups", "overlong_buffer"})
        band = CorrectionConfig(name="icepop", level="geometric", low=BAND[0], high=BAND[1])
        return config.model_copy(
            update={"loss": LossConfig.model_validate({"name": "tbpo", **kept}), "correction": band}
        )
