"""What the trainer does at each quantized tensor.

A value that reaches a site is fake-quantized: the forward pass uses ``code x scale``, the backward pass lets the
gradient through as if nothing had happened (straight-through). Without guidance the site rounds to nearest with its own
scales, which is quantization-aware training. With guidance it takes the rollout's scales and, of the two FP4 neighbours
of each value, the one that the recorded bits name (:mod:`tracefp4.quantizers.guided`). Rows without guidance fall back
to their own rounding and are counted; padding rows are never guided and influence nothing.

The guidance of the micro-batch in flight hangs on :attr:`TrainerSites.batch`. It must stay there until the backward
pass is done, because gradient checkpointing runs every layer again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import ConfigError
from tracefp4.formats.blocks import Quantized
from tracefp4.formats.fused import has_kernel
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.packed import Packed
from tracefp4.formats.spec import Spec
from tracefp4.guidance.record import SiteRecord
from tracefp4.guidance.rounding import Rounding, round_gated, round_nearest, round_recorded
from tracefp4.models.attention import dense_attention
from tracefp4.models.layout import ModelLayout
from tracefp4.models.sites import LayerSites, Operand
from tracefp4.quantizers.guided import quantize_guided
from tracefp4.quantizers.nearest import quantize_nearest
from tracefp4.training.batch import GuidedRows, MicroBatch, Routes
from tracefp4.training.checks import ScaleChecks
from tracefp4.training.observe import Observer
from tracefp4.training.pulls import PullCounts
from tracefp4.training.weights import WeightOperands

T = TypeVar("T")


class TrainerSites(LayerSites["_Experts", "_Router", "_Attention"]):
    """All site objects of the trainer.

    Args:
        layout: the model's layers and dimensions.
        spec: what the trainer fake-quantizes.
        decoder: how guided rounding reads the recorded bits.
        weights: quantized weights to share with other sites of the same model and weight numerics.

    Raises:
        ConfigError: shared weights of other numerics.
    """

    fuses = True
    """Norms and rotary embedding go through kernels (:mod:`tracefp4.models.binding`)."""

    def __init__(
        self, layout: ModelLayout, spec: Spec, decoder: str = "bracket", weights: WeightOperands | None = None
    ) -> None:
        if weights is not None and weights.numerics != spec.weights:
            raise ConfigError(f"the shared weights have other numerics than spec {spec.name!r}")
        self.layout, self.spec, self.decoder = layout, spec, decoder
        self.weights = WeightOperands(spec.weights) if weights is None else weights
        self.shapes: dict[Site, SiteShape] = {shape.site: shape for shape in layout.site_shapes(spec)}
        self.guidance: GuidedRows | None = None
        self.routes: Routes | None = None
        self._sorted: Sequence[object] | None = None
        self.observer: Observer | None = None
        self.checks, self.pulled = ScaleChecks(), PullCounts()
        self.pack_saved = False
        """Keep rounded expert inputs as codes for the backward pass. Where layers are recomputed they do not live long
        enough for that to be worth a pass."""
        super().__init__(
            experts={layer: _Experts(self, layer, index) for index, layer in enumerate(layout.moe_layers)},
            routers={layer: _Router(self, index) for index, layer in enumerate(layout.moe_layers)},
            attention={layer: _Attention(self, layer) for layer in layout.kv_layers},
        )

    @contextmanager
    def batch(
        self, batch: MicroBatch, *, guided: bool = True, replay: bool = True, observer: Observer | None = None
    ) -> Iterator[None]:
        """Attach a micro-batch for a forward and, if there is one, its backward.

        Args:
            batch: the micro-batch whose rows the model is about to see.
            guided: follow the batch's guidance where it has any.
            replay: use the rollout's expert routes where they were recorded.
            observer: compares every quantization with the batch's recorded outcomes.

        Raises:
            GuidanceCorrupt: at the end, bits that were pulled meanwhile do not pass their checks.
        """
        self.guidance = batch.guidance if guided else None
        self.routes = batch.routes if replay else None
        self.observer = observer
        self._sorted = None
        if observer is not None and observer.truth is None:
            observer.truth = batch.guidance
        try:
            yield
            if batch.guidance is not None and batch.guidance.pulls is not None:
                batch.guidance.pulls.confirm()
            self.checks.settle()
        finally:
            self.guidance = self.routes = self.observer = self._sorted = None
            if observer is not None:
                observer.truth = None

    @contextmanager
    def standing_in(self, guidance: GuidedRows | None, routes: Routes | None) -> Iterator[ScaleChecks]:
        """Other guidance and routes in the place of those attached, and checks that are counted apart."""
        own = self.guidance, self.routes, self._sorted, self.checks
        self.guidance, self.routes, self._sorted, self.checks = guidance, routes, None, ScaleChecks()
        try:
            yield self.checks
        finally:
            self.guidance, self.routes, self._sorted, self.checks = own

    def operand(self, site: Site, x: Tensor, numerics: Numerics, rows: Tensor | None) -> Operand:
        """As :meth:`quantize`, for a matrix product: exact operand and global scale."""
        fused = self._fused(site, x, numerics, rows, None)
        if fused is not None and fused.operand is not None:
            return Operand(fused.operand, fused.decode_scale(), fused.packed)
        q = self.quantize(site, x, numerics, rows)
        return Operand(q.operand(), q.decode_scale(), Packed.of(q) if self._packs(numerics) else None)

    def gated(self, site: Site, x: Tensor, numerics: Numerics) -> Operand | None:
        """:meth:`operand` of ``silu(gate) * up`` for ``x (R, 2 D)``, rows in order; ``None`` without a kernel."""
        recorded = None if self.guidance is None else self.guidance.sites.get(site)
        if recorded is not None and not recorded.bits:
            return None  # the site is not settled, which takes the values themselves
        fused = self._fused(site, x, numerics, None, None, gated=True)
        if fused is None or fused.operand is None:
            return None
        return Operand(fused.operand, fused.decode_scale(), fused.packed)

    def values(self, site: Site, x: Tensor, numerics: Numerics) -> Tensor:
        """As :meth:`quantize`: dequantized, in the dtype of ``x``."""
        fused = self._fused(site, x, numerics, None, x.dtype)
        if fused is not None and fused.values is not None:
            return fused.values
        return self.quantize(site, x, numerics).dequantize(x.dtype)

    def sorted(self, index: int, experts: Tensor, sort: Callable[[Tensor], Sequence[T]]) -> T:
        """What ``sort (layers, T, K)`` makes of a layer's routes ``experts (T, K)``.

        Recorded routes of all layers are sorted together, once while a micro-batch is attached: they are the same when
        a layer is computed again for its backward pass.
        """
        routes = self.routes
        if routes is None or routes.known is not None or experts is not routes.layers[index]:
            return sort(experts.unsqueeze(0))[0]
        if self._sorted is None:
            self._sorted = sort(routes.experts)
        return cast(Sequence[T], self._sorted)[index]

    def _packs(self, numerics: Numerics) -> bool:
        return self.pack_saved and numerics.element == "e2m1" and torch.is_grad_enabled()

    def _fused(
        self,
        site: Site,
        x: Tensor,
        numerics: Numerics,
        rows: Tensor | None,
        values: torch.dtype | None,
        *,
        gated: bool = False,
    ) -> Rounding | None:
        """One pass over ``x`` where there is a kernel for it; an observer wants codes, which it never writes."""
        if self.observer is not None or not has_kernel(x, numerics, gated):
            return None
        guidance, recorded = self.guidance, self._recorded(site, x, numerics, rows)
        if guidance is None or recorded is None:
            if gated:
                return round_gated(x, numerics, pack=self._packs(numerics))
            return round_nearest(x, numerics, pack=values is None and self._packs(numerics), values=values)
        if self.decoder != "bracket":
            return None
        valid, pack = None if guidance.complete else guidance.guided, values is None and self._packs(numerics)
        fused = round_recorded(x, recorded, numerics, rows, valid, values, pack=pack, gated=gated)
        if fused is not None and recorded.checks is not None:
            self.checks.count(fused.scales, recorded, guidance.guided, rows)
        return fused

    def quantize(self, site: Site, x: Tensor, numerics: Numerics, rows: Tensor | None = None) -> Quantized:
        """Quantize the vectors ``x (R * vectors, width)`` of a site, guided where the batch has guidance for it.

        Args:
            site: which site.
            x: one vector a row, in the order row-major over (token row, vector), or as ``rows`` says.
            numerics: the site's numerics.
            rows: ``token row * vectors + vector`` of each vector when ``x`` is in another order.
        """
        with torch.no_grad():
            result = self._guided(site, x, numerics, rows)
            if self.observer is not None:
                self.observer.see(site, x, result, numerics, rows)
        return result

    def _recorded(self, site: Site, x: Tensor, numerics: Numerics, rows: Tensor | None) -> SiteRecord | None:
        """What guides a site; arguments as of :meth:`quantize`."""
        guidance = self.guidance
        recorded = None if guidance is None else guidance.sites.get(site)
        if guidance is not None and recorded is not None and guidance.pulls is not None:
            guidance.pulls.settle(x, recorded, numerics, guidance.guided, rows, self.pulled)
        return recorded

    def _guided(self, site: Site, x: Tensor, numerics: Numerics, rows: Tensor | None) -> Quantized:
        guidance, recorded = self.guidance, self._recorded(site, x, numerics, rows)
        if guidance is None or recorded is None:
            return quantize_nearest(x, numerics)
        result = quantize_guided(x, recorded.outcome(rows), numerics, self.decoder)
        if recorded.checks is not None:
            self.checks.count(result.scales, recorded, guidance.guided, rows)
        if guidance.complete:
            return result
        return _merge(result, quantize_nearest(x, numerics), guidance.vectors(recorded.shape, rows))


def _merge(guided: Quantized, own: Quantized, mask: Tensor) -> Quantized:
    """Rows of ``guided`` where ``mask`` holds, rows of ``own`` elsewhere."""
    pick = mask[:, None]
    scale = guided.global_scale
    if scale is not None and own.global_scale is not None:
        scale = torch.where(pick, scale, own.global_scale)
    return Quantized(
        torch.where(pick, guided.codes, own.codes), torch.where(pick, guided.scales, own.scales), scale, guided.numerics
    )


@dataclass(slots=True)
class _Experts:
    owner: TrainerSites
    layer: int
    index: int
    """Among the layers with experts."""

    def gate_up(self, module: nn.Module) -> Operand:
        return self._weights.get(module, "gate_up_proj")

    def down(self, module: nn.Module) -> Operand:
        return self._weights.get(module, "down_proj")

    @property
    def _weights(self) -> WeightOperands:
        weights = self.owner.weights
        return weights if self.owner.spec.quantizes(self.layer) else weights.plain

    def enter(self, x: Tensor) -> Operand:
        return self._operand(Kind.EXPERTS_IN, x, None)

    def gated(self, gate_up: Tensor) -> Operand | None:
        """:meth:`middle` of ``silu(gate) * up``, ``gate_up (P, 2 I)``, if there is a kernel for both."""
        site = Site(self.layer, Kind.EXPERTS_MID)
        numerics = self.owner.spec.for_site(site)
        return None if numerics is None else self.owner.gated(site, gate_up.detach(), numerics)

    def middle(self, h: Tensor, pairs: Tensor | None) -> Operand:
        return self._operand(Kind.EXPERTS_MID, h, pairs)

    def sorted(self, experts: Tensor, sort: Callable[[Tensor], Sequence[T]]) -> T:
        """See :meth:`TrainerSites.sorted`."""
        return self.owner.sorted(self.index, experts, sort)

    def _operand(self, kind: Kind, x: Tensor, rows: Tensor | None) -> Operand:
        site = Site(self.layer, kind)
        numerics = self.owner.spec.for_site(site)
        if numerics is None:
            return Operand(x.detach(), None)
        return self.owner.operand(site, x.detach(), numerics, rows)


@dataclass(slots=True)
class _Router:
    owner: TrainerSites
    index: int
    settled = True
    """Rows without a recorded route are given the own one here, no ``-1`` is returned."""

    def known_routes(self) -> Tensor | None:
        """``(T, K)`` of the micro-batch if every row has recorded routes; :meth:`route` returns the same tensor."""
        routes = self.owner.routes
        return None if routes is None or routes.known is not None else routes.layers[self.index]

    def route(self, indices: Tensor) -> Tensor | None:
        routes = self.owner.routes
        if routes is None:
            return None
        chosen = routes.layers[self.index]
        if routes.known is None or chosen.shape != indices.shape:
            return chosen
        return torch.where(routes.known[self.index], chosen, indices)


@dataclass(slots=True)
class _Attention:
    owner: TrainerSites
    layer: int

    def latent(self, x: Tensor) -> Tensor:
        return self._fake(Kind.LATENT, x[:, :, None]).squeeze(2)

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
        """Attend to rounded K and V of the whole batch."""
        rope = self.owner.layout.rope_dim
        if self.owner.layout.latent_rank is not None and rope is not None:
            # The latent was quantized before its expansion; the rotated part is one vector for all heads.
            rotated = self._fake(Kind.K, k[:, :1, :, -rope:].transpose(1, 2)).transpose(1, 2)
            k = torch.cat([k[..., :-rope], rotated.expand(-1, k.shape[1], -1, -1)], dim=-1)
        else:
            k = self._fake(Kind.K, k.transpose(1, 2)).transpose(1, 2)
            v = self._fake(Kind.V, v.transpose(1, 2)).transpose(1, 2)
        return dense_attention(q, k, v, scaling=scaling, window=window, sinks=sinks)

    def _fake(self, kind: Kind, x: Tensor) -> Tensor:
        """Fake-quantize ``x (B, S, vectors, width)``."""
        site = Site(self.layer, kind)
        numerics = self.owner.spec.for_site(site)
        if numerics is None:
            return x
        values = self.owner.values(site, x.detach().reshape(-1, x.shape[-1]), numerics)
        return _StraightThrough.apply(x, values.view(x.shape))


class _StraightThrough(torch.autograd.Function):
    """Forward: the quantized values. Backward: the gradient unchanged."""

    @staticmethod
    def forward(ctx: object, x: Tensor, quantized: Tensor) -> Tensor:
        """Return ``quantized``; ``x`` only receives the gradient."""
        return quantized

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        """Identity for ``x``."""
        return grads[0], None
