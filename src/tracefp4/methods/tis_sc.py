"""``tis_sc``: no quantization in the trainer; the mismatch is met in the loss (arXiv 2609.20807).

The rollout is FP4, the trainer bfloat16. What differs is weighed by truncated importance sampling, and score centering
subtracts the drift towards the sampler that is left (:mod:`tracefp4.rl.centering`). With ``correction.name = "none"``
it is score centering alone.
"""

from __future__ import annotations

from tracefp4.config import Config, LossConfig
from tracefp4.formats.spec import Spec
from tracefp4.methods.base import Method, unquantized


class TisSc(Method):
    """FP4 rollout, bfloat16 trainer, centred REINFORCE."""

    name = "tis_sc"

    def trainer_spec(self, spec: Spec) -> Spec:
        """BF16."""
        return unquantized()

    def settings(self, config: Config) -> Config:
        """Loss ``reinforce`` with score centering; the correction stays the run's."""
        if config.loss.score_centering:
            return config
        names = {"kl", "norm_std", "filter_groups", "overlong_buffer", "aggregation", "centering_top"}
        kept = config.loss.model_dump(include=names)
        loss = LossConfig.model_validate({"name": "reinforce", "score_centering": True, **kept})
        return config.model_copy(update={"loss": loss})
