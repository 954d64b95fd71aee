"""One second of proof that the seams of the installed transformers work.

Everything that this package does to a model enters at three seams: the experts function, the attention function and the
router. A new transformers release could move one of them, and a seam that is passed by is silent: the model still
generates, only without FP4. So the doctor binds a tiny random mixture-of-experts model to sites that change nothing and
only count, and asks two questions: was every seam reached in every layer, and are the logits those of the unbound
model?
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tracefp4.models.attention import dense_attention
from tracefp4.models.binding import bound
from tracefp4.models.sites import Operand
from tracefp4.models.tiny import tiny_model

TOLERANCE = 0.05
"""Largest logit difference of two correct bfloat16 paths, as a share of the largest logit."""


@dataclass(slots=True)
class PassThrough:
    """A site object for all three seams that leaves tensors as they are and counts the calls."""

    calls: Counter[str] = field(default_factory=Counter)

    def gate_up(self, module: nn.Module) -> Operand:
        """The weight itself, ``(E, 2I, H)``."""
        return Operand(_parameter(module, "gate_up_proj"), None)

    def down(self, module: nn.Module) -> Operand:
        """The weight itself, ``(E, H, I)``."""
        return Operand(_parameter(module, "down_proj"), None)

    def enter(self, x: Tensor) -> Operand:
        """``x`` as it is."""
        self.calls["experts"] += 1
        return Operand(x, None)

    def middle(self, h: Tensor, pairs: Tensor) -> Operand:
        """``h`` as it is."""
        return Operand(h, None)

    def route(self, indices: Tensor) -> Tensor | None:
        """The router's own choice."""
        self.calls["router"] += 1
        return None

    def latent(self, x: Tensor) -> Tensor:
        """``x`` as it is."""
        return x

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Plain causal attention."""
        self.calls["attention"] += 1
        return dense_attention(q, k, v, scaling=scaling, window=window, sinks=sinks)


@dataclass(slots=True)
class PassThroughSites:
    """The same counting object at every seam of every layer."""

    site: PassThrough = field(default_factory=PassThrough)

    def experts(self, layer: int) -> PassThrough:
        """Object of the MoE block."""
        return self.site

    def router(self, layer: int) -> PassThrough:
        """Object of the router."""
        return self.site

    def attention(self, layer: int) -> PassThrough:
        """Object of the attention."""
        return self.site


def check_seams(family: str = "qwen3_moe") -> str | None:
    """Return what is wrong with the seams of the installed transformers, or ``None``.

    Args:
        family: a family of :data:`tracefp4.models.tiny.FAMILIES` with fused expert weights ``(E, out, in)``.
    """
    model = tiny_model(family)
    tokens = torch.arange(24).reshape(2, 12)
    sites = PassThroughSites()
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits.float()
        with bound(model, sites) as layout:
            after = model(tokens, use_cache=False).logits.float()
    expected = {"experts": len(layout.moe_layers), "router": len(layout.moe_layers), "attention": len(layout.kv_layers)}
    for seam, count in expected.items():
        if sites.site.calls[seam] != count:
            return f"the {seam} seam was reached {sites.site.calls[seam]} times in {count} layers"
    difference = float((after - before).abs().max() / before.abs().max())
    if not difference <= TOLERANCE:
        return f"logits change by {difference:.3g} of their size when nothing is quantized"
    return None


def _parameter(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(name).detach().to(torch.bfloat16)
