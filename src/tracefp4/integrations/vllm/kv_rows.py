"""K and V in a token's row, where rows leave by vLLM's routed-experts channel.

With the KV connector, K and V of a finished request are read from the cache once, by slot. The channel has no such
moment: when an output arrives, its blocks may be another request's. So each pass reads what it has just written, out of
the pages and on the device, cuts codes to the plan's bits, and appends them to the rows that the channel carries::

    for each run of the plan's KV sites, layer after layer, head after head:
    [ bit planes: bits * head_dim / 8 | block scales: head_dim / block ]

Prefix hits, preemption and asynchronous copies are then the channel's business for K and V as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.core import KV_KINDS, Kind, Site
from tracefp4.errors import EngineError
from tracefp4.formats import e2m1
from tracefp4.guidance.codec import pack_bits, unpack_bits
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.pool import StoredKV


@dataclass(frozen=True, slots=True)
class CarriedKV:
    """K and V that came with rows; row ``t`` is slot ``t``."""

    sites: Mapping[Site, tuple[Tensor, Tensor]]
    """Packed codes ``(T, heads, width / 2)``, of which only the plan's low bits are set, and scale bytes."""

    def stored(self, layers: Sequence[int], kind: Kind, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`tracefp4.rollout.pool.KVPool.stored`."""
        parts = [self.sites[Site(layer, kind)] for layer in layers]
        codes, scales = (torch.stack([part[i].index_select(0, slots) for part in parts]) for i in range(2))
        return codes, scales


class KVRows:
    """The KV part of a row.

    Args:
        capture: made for the plan.
    """

    def __init__(self, capture: Capture) -> None:
        table = capture.table
        self._bits = capture.bits
        self._runs = [shapes for shapes in map(table.of, table.runs) if shapes[0].site.kind in KV_KINDS]

    @property
    def nbytes(self) -> int:
        """Bytes of a token."""
        return sum(
            len(run) * run[0].vectors * (self._planes(run[0].width) + run[0].width // run[0].block)
            for run in self._runs
        )

    def _planes(self, width: int) -> int:
        return self._bits * width // 8

    def pack(self, pool: StoredKV | None, slots: Tensor | None) -> Tensor:
        """What ``slots (T,)`` hold, uint8 ``(T, nbytes)``.

        Raises:
            EngineError: no cache to read, or no pass was announced.
        """
        if pool is None or slots is None:
            raise EngineError("the plan records K and V, but vLLM's cache holds no FP4 pages, or no pass was announced")
        parts = []
        for run in self._runs:
            codes, scales = pool.stored([shape.site.layer for shape in run], run[0].site.kind, slots)
            both = torch.cat([pack_bits(e2m1.unpack(codes), self._bits), scales], dim=-1)
            parts.append(both.transpose(0, 1).flatten(1))
        return torch.cat(parts, dim=1)

    def unpack(self, rows: Tensor) -> CarriedKV:
        """The inverse of :meth:`pack`, cut to the plan's bits: rows uint8 ``(T, nbytes)``."""
        sites, start = dict[Site, tuple[Tensor, Tensor]](), 0
        for run in self._runs:
            shape, planes = run[0], self._planes(run[0].width)
            each = planes + shape.width // shape.block
            stop = start + len(run) * shape.vectors * each
            data = rows[:, start:stop].unflatten(1, (len(run), shape.vectors, each))
            for index, one in enumerate(run):
                low = unpack_bits(data[:, index, :, :planes].contiguous(), self._bits, shape.width)
                sites[one.site] = e2m1.pack(low), data[:, index, :, planes:].contiguous()
            start = stop
        return CarriedKV(sites)
