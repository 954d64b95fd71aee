"""Rows by KV slot: what the process that runs the model records, and how a finished request's rows leave it.

An engine gives each token of a sequence a *slot* of its KV pool. We keep rows in the same order, so everything that is
true of slots is true of guidance: a prefix-cache hit finds the rows that the first request left behind, a chunked
prefill writes its rows chunk by chunk, and what the cache evicts is overwritten by the slot's next owner. A log of
steps would lose all that.

During a forward pass rows go to a small *step buffer* on the device, in the order of the batch; its addresses never
change, so CUDA graphs can write it. When the pass is over they are copied to the host's *mirror*, by slot. Codes of K
and V need no such copy: they lie in a pool of their own (:class:`~tracefp4.rollout.pool.KVPool`), which is read once,
when a request ends.

Each row carries a *ticket*: a hash of the weight update, the position and the token. When a request ends, the tickets
that its tokens would have written are compared with those that are there. A row that came from elsewhere, was never
recorded, or stems from older weights is shipped as not recorded, never as somebody else's outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.core import Handle, Kind, Site
from tracefp4.errors import EngineError
from tracefp4.formats.blocks import Quantized
from tracefp4.formats.spec import Spec
from tracefp4.guidance.frame import pending_rows
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import token_hash
from tracefp4.guidance.rounding import Rounding, round_nearest
from tracefp4.guidance.store import Store
from tracefp4.models.layout import ModelLayout
from tracefp4.models.sites import Operand
from tracefp4.rollout.admission import recorded_shapes, stored_plan
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.harvest import gather
from tracefp4.rollout.pool import KVPool, StoredKV

_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_HOST = torch.device("cpu")


@dataclass(slots=True)
class Step:
    """The rows of one forward pass, on their way to the mirror."""

    slots: Tensor
    """``(T,)`` int64."""
    rows: tuple[Tensor, ...]
    """As :meth:`Capture.take` returns them; moved to the host by whoever copies the pass's other results."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What was gathered of a finished request."""

    routes: Tensor | None
    """``(rows, moe_layers, top_k)``."""
    guidance: Handle | None
    rows: int
    invalid_rows: int


@dataclass(frozen=True, slots=True)
class Shipping:
    """How rows become a frame, wherever they lie."""

    plan: Plan | None
    """``None`` ships routes alone."""
    spec: Spec
    store: Store | None
    epoch: int
    """Weight updates so far, which tickets are made of."""
    version: int
    """Weight version that the frame carries."""

    def collect(
        self, rows: Capture, pool: StoredKV | None, slots: Tensor, tokens: Sequence[int], key: str
    ) -> Collected:
        """Gather the rows of ``tokens`` but the last one, and put their frame into the store.

        Args:
            rows: on the host.
            pool: K and V; ``None`` if the plan has none.
            slots: ``(N - 1,)`` int64 on the host, where the rows lie.
            tokens: prompt and response, ``N``.
            key: of the frame.
        """
        count = len(tokens) - 1
        routes = None if rows.routes is None else rows.routes.index_select(0, slots)
        if self.plan is None or self.store is None:
            return Collected(routes, None, count, 0)
        expected = tickets(self.epoch, torch.arange(count), torch.tensor(tokens[:count]))
        sheaf = gather(rows, pool, slots, expected, self.plan)
        frame = pending_rows(
            sheaf,
            0,
            count,
            token_hash=token_hash(tuple(tokens)),
            numerics_hash=self.spec.hash,
            weight_version=self.version,
        )
        return Collected(routes, self.store.keep(key, frame), count, int((~sheaf.valid).sum()))


class Recorder:
    """Quantizes to nearest, records, and gathers.

    Args:
        layout: of the transformers model that the engine serves.
        spec: what is quantized.
        plan: what is recorded; ``None`` for routes alone.
        store: where frames go; needed with a plan.
        slots: KV slots of the engine, padding included.
        step_tokens: tokens of the largest forward pass.
        dtype: of the model.
        device: that the model runs on.
        pool: the engine's own FP4 pool, where it has one; else K and V are rounded here.

    Raises:
        EngineError: a plan without a store, or KV numerics that a pool cannot store.
    """

    def __init__(
        self,
        layout: ModelLayout,
        spec: Spec,
        plan: Plan | None,
        store: Store | None,
        *,
        slots: int,
        step_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        pool: StoredKV | None = None,
    ) -> None:
        plan = stored_plan(plan, store)
        self.layout, self.spec, self.plan, self.store, self.device = layout, spec, plan, store, device
        shapes = recorded_shapes(layout, spec, plan)
        bits = 4 if plan is None else plan.bits
        self.step = Capture(layout, shapes, bits, step_tokens, device)
        """Rows of the pass in flight, in the order of the batch."""
        self.mirror = Capture(layout, shapes, bits, slots, _HOST)
        self.pool: StoredKV | None = pool
        self._own: KVPool | None = None
        if spec.kv is not None and pool is None:
            self.pool = self._own = KVPool(layout, spec, slots, dtype, device)
        self._index = {layer: index for index, layer in enumerate(layout.moe_layers)}
        self._lines = torch.arange(step_tokens, device=device)
        self._tickets = torch.zeros(step_tokens, dtype=torch.int32, device=device)
        self._slots: Tensor | None = None
        self.cached: Tensor | None = None
        """KV slots ``(T,)`` of the pass in flight."""
        self._epoch = 0
        self.version = 0
        """Weight version that frames carry, the trainer's number."""
        self.calls: dict[str, int] = {}
        """How often each site was met since :meth:`new_weights`, for the coverage table."""

    @property
    def nbytes(self) -> int:
        """Bytes of mirror, step buffer and KV codes."""
        return self.mirror.nbytes + self.step.nbytes + (0 if self._own is None else self._own.nbytes)

    @property
    def capacity(self) -> int:
        """Tokens that a forward pass may have."""
        return len(self._lines)

    # -- During a forward pass

    def begin(self, slots: Tensor, positions: Tensor, tokens: Tensor, cached: Tensor | None = None) -> None:
        """A forward pass of tokens ``(T,)`` starts.

        Args:
            slots: ``(T,)`` where the mirror keeps their rows.
            positions: ``(T,)``.
            tokens: ``(T,)`` ids.
            cached: ``(T,)`` KV slots that they write, if those are others.

        Raises:
            EngineError: it has more tokens than the step buffer.
        """
        lines, stamps = self._batch(slots.numel())
        self._slots = slots.to(torch.int64)
        self.cached = self._slots if cached is None else cached
        stamps.copy_(tickets(self._epoch, positions, tokens))
        self.step.stamp(lines, stamps)

    def quantize(self, site: Site, x: Tensor, pairs: Tensor | None = None) -> Operand:
        """Round the input of an expert projection to nearest, and record the outcome.

        Args:
            site: which.
            x: ``(T, width)`` of the tokens in flight, or ``(P, width)`` with ``pairs``.
            pairs: ``(P,)`` int64 ``token * top_k + slot`` of each row.
        """
        numerics = self.spec.for_kind(site.kind)
        if numerics is None:
            return Operand(x, None)
        # Also when no pass was announced: a CUDA graph is captured without one, and rows are only kept by keep().
        lines, stamps = self._batch(x.shape[0] if pairs is None else x.shape[0] // self.layout.top_k)
        place = self.step.place(site, lines, stamps) if pairs is None else None
        q = round_nearest(x, numerics, self.step.bits_of(site), place=place)
        if q.planes is not None:  # no kernel has put them into their place
            self.step.write(site, q, lines, stamps, pairs)
        self._count(str(site))
        return Operand(q.factor(), q.decode_scale())

    def observe(self, site: Site, q: Quantized, pairs: Tensor | None = None) -> None:
        """Record an outcome that the engine's own quantizer produced; rows as in :meth:`quantize`."""
        rows = q.codes.shape[0]
        lines, stamps = self._batch(rows if pairs is None else rows // self.layout.top_k)
        outcome = Rounding.of(q, self.step.bits_of(site), q.operand())
        self.step.write(site, outcome, lines, stamps, pairs)
        self._count(str(site))

    def key_value(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Round K and V to the cache's format, keep their codes, and return what the cache stands for.

        Args:
            layer: decoder layer.
            slots: ``(T,)`` slots that the tokens write.
            k: ``(T, heads, head_dim)`` after RoPE.
            v: ``(T, heads, v_head_dim)``.
        """
        if self._own is None:
            return k, v
        kinds = self.layout.kv_sizes()
        shapes = {Kind.K: kinds[Kind.K], Kind.V: kinds[Kind.V]}
        parts = {kind: x.reshape(-1, *shapes[kind]) for kind, x in ((Kind.K, k), (Kind.V, v))}
        q = self._own.write(layer, slots.to(torch.int64), parts)
        if q is None:
            return k, v
        self._count(f"{layer}.{Kind.K}")
        split = parts[Kind.K].flatten(1).shape[1]
        rounded = q.dequantize(k.dtype)
        return rounded[:, :split].reshape(k.shape), rounded[:, split:].reshape(v.shape)

    def wrote_key_value(self, layer: int) -> None:
        """The engine stored K and V of a layer in FP4 pages of its own, which :attr:`pool` reads."""
        self._count(f"{layer}.{Kind.K}")

    def route(self, layer: int, chosen: Tensor) -> None:
        """Record the experts ``(T, top_k)`` of an MoE layer."""
        self.step.write_routes(self._index[layer], chosen, self._batch(chosen.shape[0])[0])
        self._count(f"{layer}.routes")

    def end(self) -> Step | None:
        """The pass is over: copies of its rows, still on the device; ``None`` if none had begun."""
        if self._slots is None:
            return None
        step, self._slots = Step(self._slots.clone(), self.step.take(self._slots.numel())), None
        return step

    def keep(self, step: Step | None) -> None:
        """Put a pass's rows into the mirror."""
        if step is not None:
            self.mirror.put(step.slots.to(_HOST), tuple(part.to(_HOST) for part in step.rows))

    # -- When a request ends, and when weights change

    def collect(self, slots: Tensor, tokens: Sequence[int], key: str, *, guidance: bool = True) -> Collected:
        """Gather the rows of a finished request, which still owns its slots.

        Args:
            slots: ``(N - 1,)`` slots of all its tokens but the last, in order.
            tokens: prompt and response, ``N``; the last one was never forwarded.
            key: of the frame in the store.
            guidance: ship a frame, if there is a plan.

        Raises:
            EngineError: slots and tokens do not fit.
        """
        slots = slots.to(_HOST, torch.int64)
        if slots.numel() != len(tokens) - 1:
            raise EngineError(f"{len(tokens)} tokens have {len(tokens) - 1} rows, but {slots.numel()} slots were given")
        shipping = Shipping(self.plan if guidance else None, self.spec, self.store, self._epoch, self.version)
        return shipping.collect(self.mirror, self.pool, slots, tokens, key)

    def new_weights(self, version: int) -> None:
        """Rows recorded so far belong to other weights from now on."""
        self._epoch += 1
        self.version = version
        self.calls.clear()

    def _batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Lines of the step buffer, and tickets, of a pass with ``count`` tokens."""
        if count > self.capacity:
            raise EngineError(
                f"a forward pass of {count} tokens does not fit the record's step buffer of {self.capacity}; "
                f"set the engine's prefill chunk to {self.capacity} or less"
            )
        return self._lines[:count], self._tickets[:count]

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


def tickets(epoch: int, positions: Tensor, tokens: Tensor) -> Tensor:
    """Tickets ``(T,)`` int32, positive, of tokens at positions after ``epoch`` weight updates.

    Two different triples share a ticket with a probability near 2^-30; a row that was never written has ticket 0.
    """
    word = positions.to(torch.int64) * _PRIMES[0] + tokens.to(torch.int64) * _PRIMES[1] + (epoch + 1) * _PRIMES[2]
    word = (word ^ (word >> 29)) * _PRIMES[0]
    word = (word ^ (word >> 32)).bitwise_and_(0x3FFFFFFF)
    return word.add_(1).to(torch.int32)
