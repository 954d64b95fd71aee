"""How much energy each input channel of an expert carries: the diagonal of ``X^T X``.

An error in a weight costs the layer's output as much as its input channel is used. The experts of a layer see different
tokens, so each has a diagonal of its own: for the gate and up projection over the tokens routed to it, for the down
projection over its own intermediates. Site objects sum them up during ordinary forward passes in bfloat16, on responses
that the policy itself gives to prompts of its task.

An expert that no calibration token reached takes the mean of its layer's experts that were reached; those are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import ModelError
from tracefp4.formats.spec import get_spec
from tracefp4.models.binding import bound
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.models.sites import ExpertsSite, Operand
from tracefp4.training.batch import Example, MicroBatch, collate, plan_micro_batches
from tracefp4.training.sites import TrainerSites


@dataclass(slots=True)
class Calibration:
    """Input energies of every expert projection."""

    energy: dict[str, Tensor]
    """float32 ``(E, K)`` by parameter name."""
    peaks: dict[str, float]
    """The largest magnitude of any input, by parameter name."""
    tokens: int
    """Tokens that were forwarded."""
    unreached: int
    """Pairs of layer and expert that no token reached."""


class _Recording:
    """An experts site that passes everything on and sums squares by expert."""

    def __init__(self, inner: ExpertsSite, experts: int, owner: _Sites) -> None:
        self._inner, self._experts, self._owner = inner, experts, owner
        self.routes: Tensor | None = None
        self.sums: dict[str, Tensor] = {}
        self.peaks: dict[str, float] = {}
        self.counts = torch.zeros(experts, dtype=torch.float64)

    def gate_up(self, module: nn.Module) -> Operand:
        return self._inner.gate_up(module)

    def down(self, module: nn.Module) -> Operand:
        return self._inner.down(module)

    def enter(self, x: Tensor) -> Operand:
        member = self._membership(x)
        self._add("gate_up_proj", member.T @ x.detach().double().square())
        self.counts += member.sum(0).cpu()
        self._peak("gate_up_proj", x[self._owner.real > 0])
        return self._inner.enter(x)

    def middle(self, h: Tensor, pairs: Tensor) -> Operand:
        if self.routes is None:
            raise ModelError("experts ran before their router: there are no routes to calibrate by")
        expert = self.routes.reshape(-1)[pairs]
        real = self._owner.real[torch.div(pairs, self.routes.shape[1], rounding_mode="floor")]
        energy = torch.zeros(self._experts, h.shape[1], dtype=torch.float64, device=h.device)
        self._peak("down_proj", h[real > 0])
        self._add("down_proj", energy.index_add_(0, expert, h.detach().double().square() * real[:, None]))
        return self._inner.middle(h, pairs)

    def _membership(self, x: Tensor) -> Tensor:
        """``(T, E)`` float64: 1 where a real token goes to an expert."""
        if self.routes is None:
            raise ModelError("experts ran before their router: there are no routes to calibrate by")
        member = torch.zeros(x.shape[0], self._experts, dtype=torch.float64, device=x.device)
        return member.scatter_(1, self.routes, 1.0) * self._owner.real[:, None]

    def _peak(self, projection: str, x: Tensor) -> None:
        largest = float(x.detach().abs().amax()) if x.numel() else 0.0
        self.peaks[projection] = max(self.peaks.get(projection, 0.0), largest)

    def _add(self, projection: str, energy: Tensor) -> None:
        known = self.sums.get(projection)
        self.sums[projection] = energy if known is None else known + energy


@dataclass(slots=True)
class _Router:
    experts: _Recording

    def route(self, indices: Tensor) -> None:
        self.experts.routes = indices.detach().to(torch.int64)


class _Sites:
    """The trainer's sites without quantization, with recording experts."""

    def __init__(self, layout: ModelLayout) -> None:
        self._plain = TrainerSites(layout, get_spec("bf16"))
        self.real = torch.empty(0)
        self._recording = {
            layer: _Recording(self._plain.experts(layer), layout.num_experts, self) for layer in layout.moe_layers
        }
        self._routers = {layer: _Router(site) for layer, site in self._recording.items()}

    def start(self, batch: MicroBatch) -> None:
        """Take note of which rows are no padding."""
        self.real = batch.real.reshape(-1).double()

    def experts(self, layer: int) -> _Recording:
        return self._recording[layer]

    def router(self, layer: int) -> _Router:
        return self._routers[layer]

    def attention(self, layer: int) -> Any:
        return self._plain.attention(layer)


@torch.no_grad()
def calibrate(model: nn.Module, sequences: Sequence[tuple[int, ...]], micro_tokens: int = 8192) -> Calibration:
    """Forward token sequences and sum up input energies.

    Args:
        model: a mixture of experts, not bound.
        sequences: token ids, two or more each; the last token of each is not forwarded.
        micro_tokens: padded rows a forward.

    Raises:
        ModelError: no sequences, or a model without experts.
    """
    layout = describe(model)
    if not layout.moe_layers:
        raise ModelError(f"the {layout.family} model has no experts to calibrate")
    if not sequences:
        raise ModelError("calibration needs at least one sequence of two tokens")
    sites, device = _Sites(layout), next(model.parameters()).device
    examples = [Example(tokens=tokens, prompt_length=1, index=i) for i, tokens in enumerate(sequences)]
    decoder = model.get_submodule(layout.decoder)
    with bound(model, sites):
        for group in plan_micro_batches(examples, micro_tokens):
            batch = collate(group, device)
            sites.start(batch)
            decoder(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    energy: dict[str, Tensor] = {}
    peaks: dict[str, float] = {}
    unreached = 0
    for layer, name in layout.experts.items():
        site = sites.experts(layer)
        reached = site.counts > 0
        unreached += int((~reached).sum())
        peaks |= {f"{name}.{projection}": peak for projection, peak in site.peaks.items()}
        for projection, total in site.sums.items():
            energy[f"{name}.{projection}"] = _filled(total.cpu(), site.counts, reached)
    return Calibration(energy, peaks, sum(len(s) - 1 for s in sequences), unreached)


def _filled(total: Tensor, counts: Tensor, reached: Tensor) -> Tensor:
    """Mean energy a token, float32; experts without tokens take the mean of the others."""
    mean = total / counts.clamp_min(1)[:, None]
    return torch.where(reached[:, None], mean, mean[reached].mean(0)).float()
