"""The reference policy of the KL penalty: the weights that training started from.

Its log-probs are a property of that policy alone. So it rounds with its own scales and routes by its own routers; what
the rollout of another policy rounded and routed is not its business.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tracefp4.formats.spec import Spec
from tracefp4.models.binding import bind
from tracefp4.models.layout import ModelLayout
from tracefp4.training.batch import MicroBatch
from tracefp4.training.policy import token_logprobs
from tracefp4.training.sites import TrainerSites


class Reference:
    """Log-probs of a frozen policy.

    Args:
        model: a copy of its own, not bound.
        layout: of the model.
        spec: what it fake-quantizes; the trainer's, so that quantization is no part of the penalty.
        temperature: divides the logits.
    """

    def __init__(self, model: nn.Module, layout: ModelLayout, spec: Spec, temperature: float) -> None:
        self._model, self._temperature = model.eval().requires_grad_(False), temperature
        self._sites = TrainerSites(layout, spec)
        bind(model, self._sites, spec=spec)

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Tensor:
        """``(B, S)`` float32 log-probs, 0 outside the response."""
        with self._sites.batch(batch, guided=False, replay=False):
            return token_logprobs(self._model, batch, self._temperature)[0]
