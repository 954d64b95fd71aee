"""``quads``: each side brought closer to bfloat16 on its own (QUADS, arXiv 2607.15810).

Trainer: *asymmetric QAT*, weights quantized and activations not, as in :mod:`~tracefp4.methods.qat_w4a16`. Rollout:
*residual activation compensation*, a second FP4 term for the half of the channels with the largest residual
(:mod:`tracefp4.quantizers.residual`). The paper compensates the experts' inputs; its KV cache was never FP4.
"""

from __future__ import annotations

from tracefp4.config import Config
from tracefp4.methods.qat_w4a16 import QatW4A16

SHARE = 0.5
"""Share of the channels with a second term: the paper's ratio."""


class Quads(QatW4A16):
    """W4A16 trainer, compensated FP4 rollout."""

    name = "quads"

    def settings(self, config: Config) -> Config:
        """Turn compensation on, at the paper's ratio unless ``rollout.residual`` names another."""
        if config.rollout.residual:
            return config
        return config.model_copy(update={"rollout": config.rollout.model_copy(update={"residual": SHARE})})
