"""Finds the basis in which a policy's keys are stored (:mod:`tracefp4.models.key_basis`), and keeps it.

A basis belongs to a run as the warm start does: it is found once, of the warm-started policy, and stays. The run's
folder has it in a file of its own, so that whatever loads a checkpoint deploys what was trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tracefp4.core import Kind, Site
from tracefp4.errors import CheckpointError, ConfigError
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import get_spec
from tracefp4.models.binding import bound
from tracefp4.models.key_basis import KeyBasis, basis_of, random_signs, set_basis
from tracefp4.models.layout import ModelLayout
from tracefp4.training.batch import Example, collate, plan_micro_batches
from tracefp4.training.policy import token_logprobs
from tracefp4.training.sites import TrainerSites

FILE = "key_basis.safetensors"
"""In a run's folder, where keys are not stored as they are."""


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
    signs = random_signs(layout.head_dim, seed).to(device) if "rotated" in name else None
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
        set_basis(model.get_submodule(path), KeyBasis(centre, signs))


def write_bases(model: Any, layout: ModelLayout, file: Path) -> None:
    """Write the bases of a model to a file; where keys are stored as they are there is none afterwards."""
    parts: dict[str, Tensor] = {}
    for layer, path in layout.attentions.items():
        basis = basis_of(model.get_submodule(path))
        if basis is not None and basis.centre is not None:
            parts[f"{layer}.centre"] = basis.centre.detach().cpu()
        if basis is not None and basis.signs is not None:
            parts["signs"] = basis.signs.detach().cpu()  # all layers share them
    if parts:
        save_file(parts, file)
    else:
        file.unlink(missing_ok=True)  # of an earlier run in the same folder


def read_bases(model: Any, layout: ModelLayout, file: Path) -> None:
    """Store the keys of a model in the bases of a file, if it is there.

    Raises:
        CheckpointError: the file is of another model.
    """
    if not file.is_file():
        return
    parts = load_file(file, device=str(next(model.parameters()).device))
    signs = parts.pop("signs", None)
    for layer, path in layout.attentions.items():
        centre = parts.pop(f"{layer}.centre", None)
        sizes = (None if centre is None else centre.shape[::2]), (None if signs is None else signs.shape)
        wanted = (layout.kv_heads, layout.head_dim), (layout.head_dim,)
        if any(size is not None and tuple(size) != right for size, right in zip(sizes, wanted, strict=True)):
            raise CheckpointError(f"{file}: the basis of layer {layer} is of heads of another size")
        if centre is not None or signs is not None:
            set_basis(model.get_submodule(path), KeyBasis(centre, signs))
    if parts:
        raise CheckpointError(f"{file} has bases of layers that the model lacks: {', '.join(sorted(parts)[:4])}")
