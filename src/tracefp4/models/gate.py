"""Is this a mixture of experts at all? A gate to pass before results about one are worth anything.

A model can have experts and a router and still behave like a dense model: experts that are copies, a router that sends
everything to two of them, a router without gradient. Replaying routes, quantizing experts and comparing the two would
then measure nothing. Four checks, in every MoE layer:

* **load**: how evenly experts are used, as entropy of the load over the entropy of equal load (1 balanced, 0 one
  expert);
* **gradient**: the loss has a finite gradient at the router's weight, and it is not zero;
* **dissimilarity**: relative distance of the weights of two experts, ``|a - b| / sqrt(|a| |b|)``: 0 for copies, the
  square root of 2 for unrelated weights of equal norm;
* **foreign routes**: the loss when every token is sent to the experts of *another* token, in all layers at once. Load
  and gate rule stay the same, only the match of token and expert is broken. If that does not cost anything, routes
  carry no information. Differences are taken token by token, and the rise must exceed twice its own standard error.

The loss has to be one that the model was trained for. A model tuned to answer prompts of one form is confidently wrong
about the prompts themselves, and any disturbance, foreign routes too, makes it less so. ``scored`` names the tokens
that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import ModelError
from tracefp4.models.binding import binding_of
from tracefp4.models.experts import NAME
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.models.routing import hook_router

_COLUMNS = 1 << 18


@dataclass(frozen=True, slots=True)
class RouterReport:
    """What :func:`router_report` measured; lists follow the MoE layers in order."""

    layers: tuple[int, ...]
    tokens: int
    """Tokens whose prediction was scored."""
    load: list[list[float]]
    """Share of (token, slot) pairs of each expert; sums to 1 in each layer."""
    balance: list[float]
    gradient: list[float]
    """L2 norm of the loss gradient at the router's weight."""
    dissimilarity: list[float]
    """Smallest relative distance of two experts of the layer."""
    loss: float
    """Mean negative log-likelihood with the model's own routes, in nats a token."""
    loss_permuted: float
    """The same with every token on the routes of another token."""
    loss_shifted: float
    """The same with every expert number raised by one."""
    rise: float
    """``loss_permuted - loss``."""
    rise_error: float
    """Standard error of ``rise`` over tokens."""

    def __str__(self) -> str:
        """The figures in short: the weakest gradient, the closest experts, and what other routes cost."""
        return (
            f"gradient at least {min(self.gradient):.2g} in every layer, experts at distance "
            f"{min(self.dissimilarity):.2g} or more, routes of other tokens raise the loss from {self.loss:.3f} to "
            f"{self.loss_permuted:.3f} nats"
        )

    def problems(self, *, min_balance: float, min_dissimilarity: float, min_rise: float) -> list[str]:
        """Sentences that say what keeps this from being a mixture of experts; empty if nothing does."""
        found = []
        if (worst := min(self.dissimilarity)) < min_dissimilarity:
            found.append(
                f"identical experts are no MoE: layer {self._at(self.dissimilarity)} has two experts at distance "
                f"{worst:.2g}, at least {min_dissimilarity:g} needed"
            )
        if not all(math.isfinite(norm) and norm > 0 for norm in self.gradient):
            found.append(f"the router of layer {self._at(self.gradient)} has gradient norm {min(self.gradient):.2g}")
        if (worst := min(self.balance)) < min_balance:
            found.append(
                f"layer {self._at(self.balance)} uses few experts: balance {worst:.2f}, at least {min_balance} needed"
            )
        if not self.rise > max(min_rise, 2 * self.rise_error):
            found.append(
                f"routes carry no information: those of other tokens raise the loss by {self.rise:.3g} nats "
                f"(standard error {self.rise_error:.2g}), more than {max(min_rise, 2 * self.rise_error):.3g} needed"
            )
        return found

    def _at(self, values: Sequence[float]) -> int:
        return self.layers[min(range(len(values)), key=values.__getitem__)]


def router_gate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    lengths: Tensor | None = None,
    scored: Tensor | None = None,
    min_balance: float = 0.5,
    min_dissimilarity: float = 1e-3,
    min_rise: float = 0.01,
    seed: int = 0,
) -> RouterReport:
    """Measure a model and refuse it if it is no mixture of experts.

    Args:
        model: causal language model with MoE layers, not bound to sites.
        input_ids: ``(B, S)`` int64 tokens of a text that the model knows; a few hundred tokens.
        lengths: ``(B,)`` int64 tokens of each row, the rest is padding on the right; ``None`` for full rows.
        scored: ``(B, S)`` bool, tokens whose prediction counts; ``None`` for all but each row's first.
        min_balance: least balance of any layer.
        min_dissimilarity: least distance of two experts in any layer.
        min_rise: least rise of the loss under foreign routes, in nats a token.
        seed: seed of the permutation of tokens.

    Raises:
        ModelError: what is missing, or why it cannot be measured.
    """
    report = router_report(model, input_ids, lengths=lengths, scored=scored, seed=seed)
    found = report.problems(min_balance=min_balance, min_dissimilarity=min_dissimilarity, min_rise=min_rise)
    if found:
        raise ModelError("; ".join(found))
    return report


def router_report(
    model: nn.Module,
    input_ids: Tensor,
    *,
    lengths: Tensor | None = None,
    scored: Tensor | None = None,
    seed: int = 0,
) -> RouterReport:
    """Measure load, router gradients, expert distances and the cost of foreign routes. See :func:`router_gate`.

    Raises:
        ModelError: no MoE layers, a bound model, fewer than two tokens a sequence, or no token to score.
    """
    layout = describe(model)
    if not layout.moe_layers:
        raise ModelError(f"the {layout.family} model has no MoE layer; upcycle it first (tracefp4.models.upcycle)")
    if binding_of(model) is not None:
        raise ModelError("the model has site objects bound; call unbind(model) before measuring its router")
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise ModelError(f"input_ids has shape {tuple(input_ids.shape)}, expected (B, S) with S of 2 or more")
    real, counted = _masks(input_ids, lengths, scored)
    text = _Text(input_ids, counted)
    with _evaluation(model):
        own, loss, gradient = _own_routes(model, layout, text)
        places = real.flatten().nonzero().flatten()
        order = torch.arange(input_ids.numel(), device=input_ids.device)
        order[places] = places[
            torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).to(order.device)
        ]
        permuted = _foreign_loss(model, layout, text, [indices[order] for indices in own])
        shifted = _foreign_loss(model, layout, text, [(indices + 1) % layout.num_experts for indices in own])
    load = [_load(indices[places], layout.num_experts) for indices in own]
    rise = (permuted - loss).double()
    return RouterReport(
        layers=layout.moe_layers,
        tokens=rise.numel(),
        load=[share.tolist() for share in load],
        balance=[float(torch.special.entr(share).sum()) / math.log(layout.num_experts) for share in load],
        gradient=gradient,
        dissimilarity=[expert_distance(model.get_submodule(name)) for name in layout.experts.values()],
        loss=float(loss.double().mean()),
        loss_permuted=float(permuted.double().mean()),
        loss_shifted=float(shifted.double().mean()),
        rise=float(rise.mean()),
        rise_error=float(rise.std() / math.sqrt(rise.numel())),
    )


@dataclass(frozen=True, slots=True)
class _Text:
    """Tokens ``(B, S)`` and which predictions count, ``(B, S - 1)`` bool."""

    input_ids: Tensor
    counted: Tensor


def _masks(input_ids: Tensor, lengths: Tensor | None, scored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Real tokens ``(B, S)``, and predictions that count ``(B, S - 1)``: bool."""
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    real = torch.ones_like(input_ids, dtype=torch.bool) if lengths is None else places < lengths[:, None]
    counted = (real if scored is None else real & scored)[:, 1:]
    if not counted.any():
        raise ModelError("no token counts: scored has to name at least one that is no padding and not first in its row")
    return real, counted


class _Site:
    """Router site: keeps the router's own choice, or answers with a given one."""

    def __init__(self, replay: Tensor | None) -> None:
        self.replay, self.own = replay, torch.empty(0)

    def route(self, indices: Tensor) -> Tensor | None:
        self.own = indices.detach()
        return self.replay


@contextmanager
def _sites(model: nn.Module, layout: ModelLayout, replay: Sequence[Tensor | None]) -> Iterator[list[_Site]]:
    """Hang a site on every router for the length of the block."""
    sites = [_Site(routes) for routes in replay]
    with ExitStack() as undo:
        for name, site in zip(layout.routers.values(), sites, strict=True):
            router = model.get_submodule(name)
            object.__setattr__(router, NAME, site)
            undo.callback(object.__delattr__, router, NAME)
            undo.callback(hook_router(router, name).remove)
        yield sites


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and gradients at the routers only; both as before afterwards."""
    training, wanted = model.training, [(p, p.requires_grad) for p in model.parameters()]
    model.eval()
    try:
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        model.train(training)
        for parameter, before in wanted:
            parameter.requires_grad_(before)


def _losses(model: Callable[..., Any], text: _Text) -> Tensor:
    """Negative log-likelihood of each token that counts, ``(N,)`` float32."""
    logits = model(input_ids=text.input_ids, use_cache=False).logits[:, :-1][text.counted]
    return nn.functional.cross_entropy(logits.float(), text.input_ids[:, 1:][text.counted], reduction="none")


def _own_routes(model: nn.Module, layout: ModelLayout, text: _Text) -> tuple[list[Tensor], Tensor, list[float]]:
    weights: list[Any] = [model.get_submodule(name).weight for name in layout.routers.values()]
    for weight in weights:
        weight.requires_grad_(True)
    with torch.enable_grad(), _sites(model, layout, [None] * len(weights)) as sites:
        losses = _losses(model, text)
        gradients = torch.autograd.grad(losses.mean(), weights, allow_unused=True)
    norms = [0.0 if g is None else float(g.float().norm()) for g in gradients]
    return [site.own for site in sites], losses.detach(), norms


@torch.no_grad()
def _foreign_loss(model: nn.Module, layout: ModelLayout, text: _Text, routes: list[Tensor]) -> Tensor:
    with _sites(model, layout, routes):
        return _losses(model, text)


def _load(indices: Tensor, experts: int) -> Tensor:
    counts = torch.bincount(indices.flatten(), minlength=experts).double()
    return counts / counts.sum()


@torch.no_grad()
def expert_distance(experts: Any) -> float:
    """Smallest relative distance between the weights of any two experts of a layer.

    Args:
        experts: module with ``gate_up_proj`` and ``down_proj``, stacked over experts on the first axis.
    """
    products = torch.zeros(len(experts.down_proj), len(experts.down_proj), dtype=torch.float64)
    products = products.to(experts.down_proj.device)
    for weight in (experts.gate_up_proj, experts.down_proj):
        for columns in weight.flatten(1).split(_COLUMNS, dim=1):
            wide = columns.double()  # distances of near-equal experts are differences of large numbers
            products = products + wide @ wide.T
    norms = products.diagonal()
    squares = (norms[:, None] + norms - 2 * products).clamp_min(0) / (norms[:, None] * norms).sqrt().clamp_min(1e-300)
    return float(squares.fill_diagonal_(torch.inf).amin().sqrt())
