"""How the experts of an upcycled model come to differ: clusters of tokens, and the channels each cluster can spare.

For one layer, with ``x`` the inputs of its MLP at the tokens of a calibration text:

1. **Clusters.** ``x`` is centred and whitened (a few directions carry most of the variance of a language model's hidden
   states and would decide alone). The whitened vectors, on the unit sphere, are clustered by k-means; a Sinkhorn step
   keeps the clusters equally large, so that every expert gets tokens.
2. **Router.** The centroids, taken back through the whitening, are the router's rows. Hidden states have a large common
   part, the mean, which says nothing about a token and would send all of them to the same experts: rows are made
   orthogonal to it. Each expert's logit is scaled to standard deviation 1, soft enough for a useful gradient and firm
   enough for a choice. What imbalance remains is removed by adding a little of the mean back, which acts as a bias.
3. **Channels.** A channel's importance to expert ``e`` is the energy it adds to the residual stream at the expert's own
   tokens, ``I_e = mean over tokens of (a_c |d_c|)^2``, weighted by the gate values. The expert gives up the channels
   with the least ``I_e / sqrt(I)``, where ``I`` is the mean over all tokens. That is the geometric mean of two wishes:
   the damage ``I_e`` should be small, and the selectivity ``I_e / I`` too, so that the channel is one that others need.

Layers are done in order within one forward pass, each on the outputs of the layers already split. Everything is in
float64 on the CPU: the choices are discrete, and float64 keeps rounding, which differs between machines and thread
counts, from deciding any of them. A router is no choice, so it is rounded to bfloat16 before its layer's tokens are
routed with it: what float64 rounded differently is gone again, instead of growing from layer to layer until it shows.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tracefp4.errors import ModelError
from tracefp4.models.upcycle import LayerSplit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FRACTION = 0.25
"""Share of the intermediate channels that each expert gives up."""
_TEMPERATURE = 0.1
_ROUNDS = 25
_BALANCE_STEPS = 200


def plan_split(
    dense: PreTrainedModel,
    tokens: Tensor,
    experts: int,
    top_k: int,
    *,
    fraction: float = FRACTION,
    seed: int = 0,
) -> list[LayerSplit]:
    """Choose routers and fresh channels for every layer of a dense model.

    Args:
        dense: Llama-like model; left as it is (a float64 copy is used, 8 bytes a parameter).
        tokens: ``(B, S)`` int64 calibration tokens without padding; a few hundred or more.
        experts: experts a layer.
        top_k: experts a token.
        fraction: share of channels that each expert gives up, in (0, 1).
        seed: seed of the first centroids.

    Raises:
        ModelError: too few tokens, or a fraction that leaves nothing to give up or to keep.
    """
    width = dense.config.intermediate_size
    count = round(fraction * width)
    if not 0 < count < width:
        raise ModelError(f"fraction {fraction} of {width} channels is {count}; it must be between 1 and {width - 1}")
    if tokens.numel() < 8 * experts:
        raise ModelError(
            f"{tokens.numel()} calibration tokens are too few for {experts} experts; give {8 * experts} or more"
        )
    generator = torch.Generator().manual_seed(seed)
    model: Any = copy.deepcopy(dense)
    model = model.to(device="cpu", dtype=torch.float64)
    parts: list[LayerSplit] = []
    for layer in model.model.layers:
        layer.mlp = _Dividing(layer.mlp, experts, top_k, count, generator, parts)
    with torch.no_grad():
        model.model(tokens.cpu(), use_cache=False)
    return parts


class _Dividing(nn.Module):
    """Stands in for an MLP: splits it when the tokens arrive, and goes on with what the sparse block computes."""

    def __init__(
        self,
        mlp: nn.Module,
        experts: int,
        top_k: int,
        count: int,
        generator: torch.Generator,
        parts: list[LayerSplit],
    ) -> None:
        super().__init__()
        self.mlp, self.sizes, self.generator, self.parts = mlp, (experts, top_k, count), generator, parts

    def forward(self, x: Tensor) -> Tensor:
        part, sparse = _divide(self.mlp, x.flatten(0, -2), *self.sizes, self.generator)
        self.parts.append(part)
        return sparse.view_as(x)


def _divide(
    mlp: Any, x: Tensor, experts: int, top_k: int, count: int, generator: torch.Generator
) -> tuple[LayerSplit, Tensor]:
    """Split one MLP; returns the split and what the sparse block computes for ``x (T, H)``."""
    router = make_router(x, experts, top_k, generator).bfloat16().float()
    values, index = (x @ router.double().T).softmax(-1).topk(top_k, -1)
    gates = torch.zeros(len(x), experts, dtype=x.dtype).scatter(1, index, values / values.sum(-1, keepdim=True))
    active = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
    energy = active.square() * mlp.down_proj.weight.square().sum(0)
    own = (gates.T @ energy) / gates.sum(0).clamp_min(1e-12)[:, None]
    score = own / energy.mean(0).sqrt().clamp_min(1e-30)
    fresh = score.topk(count, dim=-1, largest=False).indices.sort(-1).values
    kept = torch.ones_like(own).scatter(1, fresh, 0.0)
    return LayerSplit(router, fresh), mlp.down_proj(active * (gates @ kept))


def make_router(x: Tensor, experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Router weights ``(experts, H)`` that cluster the tokens ``x (T, H)``, in float64, with balanced load on them."""
    mean = x.mean(0)
    centred = x - mean
    variance, axes = torch.linalg.eigh(centred.T @ centred / len(x))
    # The shrinkage keeps directions with almost no variance, of which a short text says little, from being blown up.
    whiten = (axes * (variance.clamp_min(0) + variance.mean()).rsqrt()) @ axes.T
    centroids = _balanced_kmeans(F.normalize(centred @ whiten, dim=-1), experts, generator)
    rows = (centroids - centroids.mean(0)) @ whiten
    # ``bias`` answers 1 at the mean and varies as little as possible around it.
    bias = whiten @ whiten @ mean
    bias = bias / (bias @ mean).clamp_min(1e-30)
    rows = rows - (rows @ mean)[:, None] * bias
    rows = rows / (x @ rows.T).std(0).clamp_min(1e-30)[:, None]
    return _balance(x, rows, bias, top_k)


def _balance(x: Tensor, rows: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Shift the experts' logits until each is chosen equally often, as far as a multiple of ``bias`` can do that."""
    experts = len(rows)
    logits, common = x @ rows.T, (x @ bias)[:, None]
    shift = best = torch.zeros(experts, dtype=x.dtype)
    least = torch.inf
    for step in range(_BALANCE_STEPS):
        chosen = (logits + common * shift).topk(top_k, -1).indices
        load = torch.bincount(chosen.flatten(), minlength=experts).to(x.dtype) * (experts / chosen.numel())
        spread = float((load - 1).square().sum())
        if spread < least:
            least, best = spread, shift
        shift = shift - 0.1 / (1 + step / 20) * (load - 1)
    return rows + best[:, None] * bias


def _balanced_kmeans(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Unit centroids ``(clusters, D)`` of unit ``points (T, D)``; soft assignment, equal column sums (Sinkhorn)."""
    start = torch.randperm(len(points), generator=generator)[:clusters]
    centroids = points[start]
    for _ in range(_ROUNDS):
        share = ((points @ centroids.T) / _TEMPERATURE).softmax(-1)
        for _ in range(10):
            share = share / share.sum(0, keepdim=True)
            share = share / share.sum(1, keepdim=True)
        centroids = F.normalize(share.T @ points, dim=-1)
    return centroids
