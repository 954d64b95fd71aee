"""Finds the basis in which a policy's keys are stored (:mod:`tracefp4.models.key_basis`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Kind, Site
from tracefp4.errors import ConfigError
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import get_spec
from tracefp4.models.binding import bound
from tracefp4.models.key_basis import KeyBasis, hadamard, set_basis
from tracefp4.models.layout import ModelLayout
from tracefp4.training.batch import Example, collate, plan_micro_batches
from tracefp4.training.policy import token_logprobs
from tracefp4.training.sites import TrainerSites


class _Means(TrainerSites):
    """Adds keys up, and rounds nothing."""

    def __init__(self, layout: ModelLayout) -> None:
        super().__init__(layout, get_spec("nvfp4-kv4"))
        self.sums: dict[int, Tensor] = {}
        self.real: Tensor | None = None
        self.rows = 0

    def values(self, site: Site, x: Tensor, numerics: Numerics) -> Tensor:
        """The vectors as they are."""
        if site.kind is Kind.K and self.real is not None:
            keys = x.view(-1, self.shapes[site].vectors, x.shape[1]).double()
            mine = (keys * self.real[:, None, None]).sum(0)
            self.sums[site.layer] = self.sums.get(site.layer, torch.zeros_like(mine)) + mine
        return x


@torch.no_grad()
def store_keys(
    model: Any, layout: ModelLayout, name: str, examples: Sequence[Example], micro_tokens: int, seed: int = 0
) -> None:
    """Store the keys of a policy in another basis, on every layer with a KV cache.

    Args:
        model: not bound.
        layout: its layout.
        name: ``rotated``, ``centred`` or ``centred-rotated``.
        examples: sequences over which the mean is taken.
        micro_tokens: padded rows a forward.
        seed: of the random signs.

    Raises:
        ConfigError: a model with latent attention, or keys that cannot be rotated.
    """
    if layout.latent_rank is not None:
        raise ConfigError("keys of latent attention are stored as they are: set key_basis = 'plain'")
    device = next(model.parameters()).device
    turn = hadamard(layout.head_dim, seed).to(device) if "rotated" in name else None
    means = _Means(layout)
    if "centred" in name:
        with bound(model, means):
            for group in plan_micro_batches(examples, micro_tokens):
                batch = collate(group, device)
                means.real = batch.real.flatten().double()
                means.rows += sum(batch.lengths)
                with means.batch(batch):
                    token_logprobs(model, batch)
    for layer, path in layout.attentions.items():
        centre = (means.sums[layer] / means.rows).float().unsqueeze(1) if "centred" in name else None
        set_basis(model.get_submodule(path), KeyBasis(centre, turn))
