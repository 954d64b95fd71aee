"""The engine's site objects: quantize to nearest, record, and attend over the pool.

Everything a serving engine does to a tensor at these points happens here, in decode-shaped arithmetic of its own:

- experts: the input of each projection is quantized, its outcome recorded beside the token's slot, and its exact
  operand handed on, with a second one under residual compensation; weights were quantized when they were synced;
- routers: the chosen experts are recorded;
- attention: K and V of the current tokens are written to the pool as FP4, then the whole context is read back from the
  pool. What was just computed is never attended to directly;
- gated delta nets: a decode step updates the rows of the state pool where they lie.

The batch in flight hangs on :attr:`EngineSites.batch`. Each object counts its calls, so that a layer that a model
skipped or ran twice is noticed after the forward pass instead of becoming a row that nobody wrote.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tracefp4.core import Kind, Site
from tracefp4.errors import EngineError
from tracefp4.formats.spec import Spec
from tracefp4.guidance.rounding import (
    Rounding,
    round_compensated,
    round_gated,
    round_gated_compensated,
    round_nearest,
    round_normed,
)
from tracefp4.kernels.place import Place
from tracefp4.models.latent import expand_latent, join_rope, rope_part
from tracefp4.models.layout import ModelLayout
from tracefp4.models.norms import plain_norm
from tracefp4.models.operands import OperandCache
from tracefp4.models.recurrence import convolve, delta_rule
from tracefp4.models.sites import Choice, Heads, LayerSites, Operand
from tracefp4.rollout.attend import attend_decode, attend_prefill
from tracefp4.rollout.batch import Batch, DecodeBatch, PrefillBatch
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.pool import KVPool
from tracefp4.rollout.state import StatePool

if TYPE_CHECKING:
    from tracefp4.kernels.experts import ExpertWeight


class EngineSites(LayerSites["_Experts", "_Router", "_Attention"]):
    """All site objects of the engine.

    Args:
        layout: the model's layers and sizes.
        spec: what is quantized.
        max_batch: sequences that decode at once; attention kernels cut their work accordingly.
        residual: share of each token's channels whose residual is added to the experts' inputs; 0 for none.
    """

    pool: KVPool
    """Where K and V live; set by :meth:`serve`."""
    capture: Capture
    """Where outcomes and routes are recorded; set by :meth:`serve`."""
    states: StatePool
    """Where linear-attention states live; set by :meth:`serve`."""

    def __init__(self, layout: ModelLayout, spec: Spec, max_batch: int, residual: float = 0.0) -> None:
        self.layout, self.spec, self.max_batch, self.residual = layout, spec, max_batch, residual
        self.batch: Batch | None = None
        self.weight_scales: dict[tuple[int, str], Tensor | None] = {}
        """FP32 scale ``(E,)`` of each quantized weight, by layer and projection; written at sync, in place."""
        self.kernel_weights: dict[tuple[int, str], ExpertWeight] = {}
        """Quantized weights arranged for the grouped kernel, where it takes them; written at sync, in place."""
        self.operands = OperandCache()
        self._calls: Counter[str] = Counter()
        super().__init__(
            experts={layer: _Experts(self, layer) for layer in layout.moe_layers},
            routers={layer: _Router(self, index) for index, layer in enumerate(layout.moe_layers)},
            attention={layer: _Attention(self, layer) for layer in layout.kv_layers},
        )

    def serve(self, pool: KVPool, capture: Capture, states: StatePool) -> None:
        """Set what a forward pass writes to; made after the weights are packed, which frees memory for it."""
        self.pool, self.capture, self.states = pool, capture, states

    def delta(self, layer: int) -> _Delta:
        """Object of the gated delta net in ``layer``."""
        return _Delta(self, layer)

    @property
    def experts_by_kernel(self) -> bool:
        """Whether every projection of every layer is computed by the grouped kernel."""
        expected = 2 * len(self.layout.moe_layers)
        return expected > 0 and len(self.kernel_weights) == expected

    @property
    def running(self) -> Batch:
        """The batch in flight.

        Raises:
            EngineError: the model was called from outside of the engine.
        """
        if self.batch is None:
            raise EngineError("the engine's model was called from outside of the engine; give the engine its own copy")
        return self.batch

    def here(self, what: str) -> Batch:
        """Count a call and return the batch in flight."""
        batch = self.running
        self._calls[what] += 1
        return batch

    def check_calls(self, *, decode: bool = False) -> None:
        """After a forward pass: every site was reached exactly once.

        Args:
            decode: the pass was a decode step, in which gated delta nets are sites too.

        Raises:
            EngineError: naming a site that was not.
        """
        calls, self._calls = self._calls, Counter()
        expected = {f"{layer}.{part}" for layer in self.layout.moe_layers for part in ("enter", "middle")}
        expected |= {f"{index}.route" for index in range(len(self.layout.moe_layers))}
        expected |= {f"{layer}.attend" for layer in self.layout.kv_layers}
        if self.layout.latent_rank is not None:
            expected |= {f"{layer}.latent" for layer in self.layout.kv_layers}
        if decode:
            expected |= {f"{layer}.delta" for layer in self.layout.deltas}
        wrong = [name for name in sorted(expected | set(calls)) if calls[name] != (1 if name in expected else 0)]
        if wrong:
            raise EngineError(
                f"site {wrong[0]} was reached {calls[wrong[0]]} times in one forward pass, expected once: the model "
                "skips or repeats layers, which the engine cannot record"
            )


@dataclass(slots=True)
class _Experts:
    owner: EngineSites
    layer: int
    _entered: tuple[Tensor, Rounding] | None = None
    """What :meth:`enter_normed` made, until :meth:`enter` is called with the same rows."""

    def gate_up(self, module: nn.Module) -> Operand:
        return self._weight(module, "gate_up_proj")

    def down(self, module: nn.Module) -> Operand:
        return self._weight(module, "down_proj")

    def by_kernel(self, module: nn.Module) -> tuple[ExpertWeight, ExpertWeight] | None:
        """Both projections for the grouped kernel, if it takes them."""
        up = self.owner.kernel_weights.get((self.layer, "gate_up_proj"))
        down = self.owner.kernel_weights.get((self.layer, "down_proj"))
        return None if up is None or down is None else (up, down)

    @property
    def takes_norm(self) -> bool:
        """Whether :meth:`enter_normed` may make more of its norm than a tensor."""
        return self.owner.spec.for_site(Site(self.layer, Kind.EXPERTS_IN)) is not None and not self.owner.residual

    def enter(self, x: Tensor) -> Operand:
        batch = self.owner.here(f"{self.layer}.enter")
        entered, self._entered = self._entered, None
        if entered is not None and entered[0].data_ptr() == x.data_ptr() and entered[0].numel() == x.numel():
            return self._recorded(Site(self.layer, Kind.EXPERTS_IN), entered[1], batch, None)
        return self._quantize(Kind.EXPERTS_IN, x, batch, None)

    def enter_normed(self, x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: bool) -> tuple[Tensor, Tensor]:
        """``x + added`` and its norm; where there is a kernel for it, the rounding that :meth:`enter` will ask for."""
        site, batch = Site(self.layer, Kind.EXPERTS_IN), self.owner.running
        numerics = self.owner.spec.for_site(site)
        if self.takes_norm and numerics is not None:
            bits, place = self.owner.capture.bits_of(site), self._place(site, batch)
            flat, other = (t.contiguous().view(-1, t.shape[-1]) for t in (x, added))
            found = round_normed(flat, other, weight, eps, numerics, bits, offset=offset, place=place)
            if found is not None:
                hidden, normed, rounding = found
                self._entered = normed, rounding
                return hidden.view(x.shape), normed.view(x.shape)
        hidden = x + added
        return hidden, plain_norm(hidden, weight, eps, offset)

    def middle(self, h: Tensor, pairs: Tensor | None) -> Operand:
        """``pairs``: of each row; ``None`` if they are in order."""
        batch = self.owner.here(f"{self.layer}.middle")
        return self._quantize(Kind.EXPERTS_MID, h, batch, pairs)

    def gated(self, gate_up: Tensor) -> Operand | None:
        """:meth:`middle` of ``silu(gate) * up``, ``gate_up (P, 2I)`` in order of pairs, if there is a kernel for it."""
        site = Site(self.layer, Kind.EXPERTS_MID)
        numerics = self.owner.spec.for_site(site)
        if numerics is None:
            return None
        batch = self.owner.running
        bits, place, residual = self.owner.capture.bits_of(site), self._place(site, batch), self.owner.residual
        if residual:
            q = round_gated_compensated(gate_up, numerics, residual, bits, place=place)
        else:
            q = round_gated(gate_up, numerics, bits, place=place)
        if q is None:
            return None
        self.owner.here(f"{self.layer}.middle")
        return self._recorded(site, q, batch, None)

    @property
    def _quantized(self) -> bool:
        """Whether the weights of this layer are."""
        return self.owner.spec.weights_of(self.layer) is not None

    def _weight(self, module: nn.Module, projection: str) -> Operand:
        weight = getattr(module, projection)
        if self._quantized and (self.layer, projection) in self.owner.kernel_weights:
            raise EngineError(
                f"{projection} of layer {self.layer} is kept for the grouped kernel alone, and a forward pass without "
                "kernels asked for it; set TRACEFP4_KERNELS before the engine is built"
            )
        if weight.is_cuda:
            # Captured graphs must read the weight itself: a kept copy would survive the next sync in them.
            return self._make(module, projection, weight.detach())
        return self.owner.operands.get(weight, lambda: self._make(module, projection, weight.detach()))

    def _make(self, module: nn.Module, projection: str, values: Tensor) -> Operand:
        if getattr(module, "is_transposed", False):
            values = values.transpose(1, 2)
        if not self._quantized:
            return Operand(values, None)
        # A model in bfloat16 is not copied; in a wider dtype the values are exact all the same.
        return Operand(values.to(torch.bfloat16), self.owner.weight_scales[self.layer, projection])

    def _quantize(self, kind: Kind, x: Tensor, batch: Batch, pairs: Tensor | None) -> Operand:
        site, residual = Site(self.layer, kind), self.owner.residual
        numerics = self.owner.spec.for_site(site)
        if numerics is None:
            return Operand(x, None)
        bits, place = self.owner.capture.bits_of(site), None if pairs is not None else self._place(site, batch)
        if residual:
            q = round_compensated(x, numerics, residual, bits, place=place)
        else:
            q = round_nearest(x, numerics, bits, place=place)
        return self._recorded(site, q, batch, pairs)

    def _place(self, site: Site, batch: Batch) -> Place | None:
        """Where a kernel that quantizes this site records what it finds."""
        return self.owner.capture.place(site, batch.slots, batch.tickets)

    def _recorded(self, site: Site, q: Rounding, batch: Batch, pairs: Tensor | None) -> Operand:
        if q.planes is not None:  # no kernel has put them into their place
            self.owner.capture.write(site, q, batch.slots, batch.tickets, pairs)
        return Operand(q.factor(), q.decode_scale(), second=q.second)


@dataclass(slots=True)
class _Router:
    owner: EngineSites
    index: int

    def route(self, indices: Tensor) -> Tensor | None:
        batch = self.owner.here(f"{self.index}.route")
        self.owner.capture.write_routes(self.index, indices, batch.slots)
        return None

    def choose(self, logits: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """Choose and record in one kernel, where there is one."""
        from tracefp4.kernels.choice import choose

        batch = self.owner.here(f"{self.index}.route")
        return choose(
            logits, choice.top_k, renormalise=choice.renormalise, dtype=choice.dtype,
            routes=self.owner.capture.routes_of(self.index), slots=batch.slots,
        )  # fmt: skip


@dataclass(slots=True)
class _Attention:
    owner: EngineSites
    layer: int

    def latent(self, x: Tensor) -> Tensor:
        batch = self.owner.here(f"{self.layer}.latent")
        stored = self.owner.pool.write(self.layer, batch.slots, {Kind.LATENT: x.flatten(0, 1).unsqueeze(1)})
        # The model expands the current tokens' latents; attend expands those of the whole context again, from the pool.
        return x if stored is None else stored.dequantize(x.dtype).view(x.shape)

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
        """Store K and V of the current tokens, and attend to what is stored."""
        batch = self.owner.here(f"{self.layer}.attend")
        self.owner.pool.write(self.layer, batch.slots, self._parts(module, k, v))
        return self._attend_stored(module, q, batch, scaling, window, sinks)

    def takes_heads(self) -> bool:
        """Whether K and V are stored by kernels."""
        return self.owner.pool.for_kernels

    def attend_heads(
        self, module: Any, heads: Heads, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor | None:
        """:meth:`attend` from projected rows, where a kernel stores them."""
        batch, norms = self.owner.running, None
        if heads.eps is not None:
            norms = module.q_norm.weight, module.k_norm.weight, heads.eps, heads.added
        rows, k, v, cos, sin = (x.flatten(0, 1) for x in (q, k, v, cos, sin))
        turned = self.owner.pool.write_heads(self.layer, batch.slots, rows, k, v, (cos, sin), norms)
        if turned is None:
            return None
        self.owner.here(f"{self.layer}.attend")
        queries = turned.unflatten(0, q.shape[:2]).transpose(1, 2)
        return self._attend_stored(module, queries, batch, heads.scaling, heads.window, None)

    def _attend_stored(
        self, module: nn.Module, q: Tensor, batch: Batch, scaling: float, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        if isinstance(batch, PrefillBatch):
            kv, read = self.owner.pool.paged(self.layer, 1), partial(self._read, module)
            return attend_prefill(q, kv, read, batch.pieces, scaling=scaling, window=window, sinks=sinks)
        return attend_decode(
            q,
            self.owner.pool.paged(self.layer, batch.page_size),
            partial(self._read, module),
            batch.pages,
            batch.context,
            batch.lengths,
            scaling=scaling,
            window=window,
            sinks=sinks,
            max_batch=self.owner.max_batch,
        )

    def _parts(self, module: nn.Module, k: Tensor, v: Tensor) -> dict[Kind, Tensor]:
        """What the pool stores of the current tokens, ``(B * S, vectors, width)`` by kind."""
        parts = {Kind.K: k, Kind.V: v} if self.owner.layout.latent_rank is None else {Kind.K: rope_part(module, k)}
        return {kind: x.transpose(1, 2).flatten(0, 1) for kind, x in parts.items()}

    def _read(self, module: nn.Module, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V ``(B, heads, L, width)`` of slots ``(B, L)``."""
        parts = self.owner.pool.read(self.layer, slots)
        k = parts[Kind.K].transpose(1, 2)
        if self.owner.layout.latent_rank is None:
            return k, parts[Kind.V].transpose(1, 2)
        k_nope, v = expand_latent(module, parts[Kind.LATENT].squeeze(2))
        return join_rope(k_nope, k), v


@dataclass(slots=True)
class _Delta:
    owner: EngineSites
    layer: int

    @property
    def steps(self) -> bool:
        return isinstance(self.owner.batch, DecodeBatch)

    def step(self, module: Any, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        batch = self.owner.here(f"{self.layer}.delta")
        if not isinstance(batch, DecodeBatch) or batch.state_rows is None:
            raise EngineError(f"layer {self.layer}: a gated delta net was stepped outside of a decode step")
        conv, recurrent = self.owner.states.of(self.layer)
        mixed = convolve(mixed, conv, batch.state_rows, module.conv1d.weight.squeeze(1), module.conv1d.bias)
        return delta_rule(mixed, a, b, module.A_log, module.dt_bias, recurrent, batch.state_rows)
