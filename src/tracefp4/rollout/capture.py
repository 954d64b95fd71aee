"""Recording quantization outcomes where they happen, in rows that belong to KV slots.

A token's outcomes are written at quantize time into the row of the slot that holds its K and V. So everything that is
true of slots is true of guidance: a prompt that samples share has its rows once, a copied page takes its rows along,
and what a freed slot held is overwritten by its next owner. Codes of K and V need no recording at all: the pool *is*
the record.

One row is bytes, run after run of equal sites (:class:`~tracefp4.guidance.layout.Run`), in a run site after site, and
in a site vector after vector::

    [ bit planes: bits * width / 8 | block scales: width / block, whole bytes | global scale: 4 | ticket: 4 ]

so that the kernel that quantizes writes an outcome where it belongs (elsewhere one scatter does), one gather reads all
sites, and one view shows all sites of a run. The *ticket*
(:mod:`tracefp4.rollout.request`) says who wrote the row; a row that bears another ticket was never recorded and is
marked invalid. Scales are whole here even if the plan sends three bits of them: their checksum is taken over the whole
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.core import KV_KINDS, Site, SiteShape, route_dtype
from tracefp4.errors import EngineError
from tracefp4.guidance.layout import table_of
from tracefp4.guidance.rounding import Rounding
from tracefp4.kernels.place import Place
from tracefp4.models.layout import ModelLayout

_TICKET = 4
_GLOBAL = 4


@dataclass(frozen=True, slots=True)
class _Column:
    """Where a site's bytes stand in a row."""

    shape: SiteShape
    start: int
    planes: int
    """Bytes of bit planes a vector."""
    scales: int
    """Bytes of block scales a vector."""

    @property
    def vector(self) -> int:
        """Bytes a vector."""
        return self.planes + self.scales + (_GLOBAL if self.shape.token_scale else 0) + _TICKET

    @property
    def stop(self) -> int:
        """First byte after the site."""
        return self.start + self.shape.vectors * self.vector


@dataclass(frozen=True, slots=True)
class Rows:
    """Recorded outcomes of a run of ``L`` sites for ``T`` slots, on the device."""

    planes: Tensor
    """uint8 ``(L, T, vectors, bits * width / 8)``."""
    scales: Tensor
    """uint8 ``(L, T, vectors, width / block)``, whole bytes."""
    global_scale: Tensor | None
    """float32 ``(L, T, vectors)``."""
    tickets: Tensor
    """int32 ``(L, T, vectors)``."""


class Capture:
    """Slot-indexed record of expert sites and routes.

    Args:
        layout: for the routes.
        shapes: the plan's sites, of any kind; those of K, V and latents are left to the pool.
        bits: low bits kept of each code.
        slots: slots of the pool.
        device: where the record lies.
    """

    def __init__(
        self, layout: ModelLayout, shapes: tuple[SiteShape, ...], bits: int, slots: int, device: torch.device
    ) -> None:
        self.table, self.bits = table_of(shapes), bits
        self._columns: dict[Site, _Column] = {}
        end = 0
        for shape in (shape for run in self.table.runs for shape in self.table.of(run)):
            if shape.site.kind not in KV_KINDS:
                column = _Column(shape, end, bits * shape.width // 8, shape.width // shape.block)
                self._columns[shape.site] = column
                end = column.stop
        self._rows = torch.zeros(slots, end, dtype=torch.uint8, device=device)
        self._forwarded = torch.zeros(slots, dtype=torch.int32, device=device)
        moe = len(layout.moe_layers)
        self.routes: Tensor | None = None
        """``(slots, moe_layers, top_k)`` expert ids."""
        if moe:
            dtype = route_dtype(layout.num_experts)
            self.routes = torch.zeros(slots, moe, layout.top_k, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        routes = 0 if self.routes is None else self.routes.numel() * self.routes.element_size()
        return self._rows.numel() + 4 * self._forwarded.numel() + routes

    def stamp(self, slots: Tensor, tickets: Tensor) -> None:
        """Note who forwards the tokens in ``slots (T,)``; what the pool records goes by this."""
        self._forwarded.index_put_((slots,), tickets)

    def stamps(self, slots: Tensor) -> Tensor:
        """Tickets ``(T,)`` int32 of those who last forwarded tokens in ``slots``."""
        return self._forwarded.index_select(0, slots)

    @property
    def forwarded(self) -> Tensor:
        """``(slots,)`` int32, where :meth:`stamp` notes tickets."""
        return self._forwarded

    def bits_of(self, site: Site) -> int:
        """Bits of each code that are recorded at ``site``; 0 if the plan leaves it out."""
        return self.bits if site in self._columns else 0

    def place(self, site: Site, slots: Tensor, tickets: Tensor) -> Place | None:
        """Where a kernel records what :meth:`write` would; ``None`` if the plan leaves the site out.

        Args:
            site: which.
            slots: ``(T,)`` int64 slot of each token.
            tickets: ``(T,)`` int32 ticket of each token.
        """
        column = self._columns.get(site)
        if column is None:
            return None
        return Place(self._rows, column.start, column.vector, column.shape.vectors, slots, tickets)

    def write(self, site: Site, q: Rounding, slots: Tensor, tickets: Tensor, pairs: Tensor | None) -> None:
        """Record an outcome; nothing happens if the plan leaves the site out.

        Args:
            site: which.
            q: bit planes and scales of ``R`` vectors, ``T`` tokens times those of a token.
            slots: ``(T,)`` int64 slot of each token.
            tickets: ``(T,)`` int32 ticket of each token.
            pairs: ``(R,)`` int64 ``token * vectors + vector`` of each row; ``None`` if rows are in that order.
        """
        column = self._columns.get(site)
        if column is None:
            return
        vectors = column.shape.vectors
        token = None if pairs is None else torch.div(pairs, vectors, rounding_mode="floor")
        ticket = tickets.unsqueeze(1).expand(-1, vectors) if token is None else tickets[token]
        if q.planes is None:
            raise EngineError(f"site {site} has no bit planes to record")
        parts = [q.planes, q.scales]
        if column.shape.token_scale:
            if q.global_scale is None:
                raise EngineError(
                    f"site {site} has no global scale to record, though its numerics has one for each row"
                )
            parts.append(q.global_scale.reshape(-1, 1).contiguous().view(torch.uint8))
        parts.append(ticket.reshape(-1, 1).contiguous().view(torch.uint8))
        view = self._view(column)
        if token is None or pairs is None:
            view.index_put_((slots,), torch.cat(parts, dim=-1).unflatten(0, (-1, vectors)))
        else:
            view.index_put_((slots[token], pairs - token * vectors), torch.cat(parts, dim=-1))

    def write_routes(self, index: int, chosen: Tensor, slots: Tensor) -> None:
        """Record the experts ``chosen (T, top_k)`` of the ``index``-th MoE layer."""
        if self.routes is None:
            raise EngineError("a model without MoE layers has no routes to record")
        self.routes[:, index].index_put_((slots,), chosen.to(self.routes.dtype))

    def routes_of(self, index: int) -> Tensor | None:
        """Where the ``index``-th MoE layer records its routes, ``(slots, top_k)``; ``None`` if nothing does."""
        return None if self.routes is None else self.routes[:, index]

    def read(self, slots: Tensor) -> list[Rows | None]:
        """Gather the rows of ``slots (T,)``: what was recorded of each run of the table, ``None`` if the pool has it.

        One gather, whatever the number of sites.
        """
        data = self._rows.index_select(0, slots)
        columns = [[self._columns.get(shape.site) for shape in self.table.of(run)] for run in self.table.runs]
        return [None if run[0] is None else self._cut(data, run[0], len(run)) for run in columns]

    def _cut(self, data: Tensor, column: _Column, sites: int) -> Rows:
        """The rows of ``sites`` equal sites that start with ``column``."""
        part = data.narrow(1, column.start, sites * (column.stop - column.start))
        part = part.unflatten(1, (sites, column.shape.vectors, column.vector)).transpose(0, 1)
        planes, scales, rest = part.tensor_split((column.planes, column.planes + column.scales), dim=-1)
        scale = None
        if column.shape.token_scale:
            scale, rest = _words(rest[..., :_GLOBAL], torch.float32), rest[..., _GLOBAL:]
        return Rows(planes, scales, scale, _words(rest, torch.int32))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows of slots ``source (n,)`` to slots ``target (n,)``."""
        for tensor in self._tensors():
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def take(self, count: int) -> tuple[Tensor, ...]:
        """Copies of the first ``count`` slots, as :meth:`put` takes them."""
        return tuple(tensor[:count].clone() for tensor in self._tensors())

    def put(self, slots: Tensor, rows: tuple[Tensor, ...]) -> None:
        """Write what :meth:`take` of an equal record returned to ``slots (count,)``, on this record's device."""
        for tensor, part in zip(self._tensors(), rows, strict=True):
            tensor.index_copy_(0, slots, part)

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self._rows, self._forwarded, self.routes) if tensor is not None]

    def _view(self, column: _Column) -> Tensor:
        """``(slots, vectors, bytes)`` view of a site's columns."""
        return self._rows[:, column.start : column.stop].unflatten(1, (column.shape.vectors, column.vector))


def _words(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Four bytes ``(..., 4)`` as one number ``(...)``, aligned and contiguous."""
    return data.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(-1)
