"""Looking on where an engine rounds to FP4 with kernels of its own: nothing is computed, codes are read.

A quantizer that is a call of its own returns packed codes and block scales, and a hook behind it sees them. What the
call does not say is where it happens, so :class:`Looker` notes the layer on the way into its experts. Rows come in one
of two orders::

    token by token      row t is token t                  one row a token, or token and slot in that order
    expert by expert    rows sorted or grouped by expert  :class:`Grouped` says in which row a token's slot ended up

The second is how kernels run that round the input of the down projection outside: then a token is rounded once for each
of its experts. If these share one global scale, all its rows are equal, and the first is recorded as *the* input of the
experts; if they do not, there is no such thing, and it is refused.

Hooks are written against the sources of the tested releases and tested with stand-ins of their signatures. They have
not run on the hardware, and the capability tables say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Kind, Site
from tracefp4.errors import EngineError
from tracefp4.formats import e2m1
from tracefp4.formats.blocks import Quantized
from tracefp4.integrations.engines.layouts import from_matrix_view, linear_scales, tiled_rows
from tracefp4.integrations.engines.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Grouped:
    """Where each of ``P`` token and slot pairs stands, in the order ``token * top_k + slot``."""

    rows: Tensor
    """``(P,)`` row of the codes."""
    scale_rows: Tensor
    """``(P,)`` row of the block scales, which begin a tile with each expert."""
    experts: Tensor
    """``(P,)`` expert."""

    @classmethod
    def sorted(cls, positions: Tensor, experts: Tensor, starts: Tensor, scale_starts: Tensor) -> Grouped:
        """Rows sorted by expert, scales padded to whole tiles for each.

        Args:
            positions: ``(P,)`` sorted row of each pair.
            experts: ``(T, top_k)`` chosen experts.
            starts: ``(E + 1,)`` first row of each expert.
            scale_starts: ``(E + 1,)`` first row of its scales.
        """
        chosen, rows = experts.reshape(-1).to(torch.int64), positions.reshape(-1).to(torch.int64)
        return cls(rows, scale_starts[chosen].to(torch.int64) + rows - starts[chosen].to(torch.int64), chosen)

    @classmethod
    def masked(cls, source: Tensor, counts: Tensor, experts: Tensor, capacity: int) -> Grouped:
        """Rows in one bin of ``capacity`` rows for each expert.

        Args:
            source: ``(E, at least capacity)`` token of each row.
            counts: ``(E,)`` rows that are used.
            experts: ``(T, top_k)`` chosen experts; below 0 for a slot without one.
            capacity: rows of a bin.
        """
        tokens, bins = experts.shape[0], counts.shape[0]
        line = torch.arange(capacity, device=experts.device)
        token = torch.where(line < counts.unsqueeze(1), source[:, :capacity].to(torch.int64), tokens)
        place = token.new_zeros(bins, tokens + 1).scatter_(1, token, line.expand(bins, -1))
        chosen = experts.to(torch.int64).clamp(min=0).reshape(-1)
        pair_token = torch.arange(tokens, device=experts.device).repeat_interleave(experts.shape[1])
        found = place[chosen, pair_token]
        padded = -(-capacity // 128) * 128
        return cls(chosen * capacity + found, chosen * padded + found, chosen)


@dataclass(slots=True)
class Here:
    """The experts that are being computed."""

    layer: int
    module: Any = None
    """The engine's own."""
    dispatch: Any = None
    """What a dispatcher said of where it put each token."""
    grouped: Grouped | None = None
    calls: int = 0
    """Of a quantizer that is called once for each site."""


_HERE: ContextVar[Here | None] = ContextVar("tracefp4_experts", default=None)
"""Fixed when a CUDA graph is captured: what is recorded then is recorded at each replay."""


@dataclass(slots=True)
class Looker:
    """Records what an engine's quantizers return.

    Args:
        recorder: gives the recorder, ``None`` before there is one: engines run a model to measure memory first.
    """

    recorder: Callable[[], Recorder | None]
    _shared: dict[int, bool] = field(default_factory=dict)
    """Whether the experts of a layer share one global scale."""

    @property
    def here(self) -> Here | None:
        """The experts that are being computed; ``None`` outside of experts, where nothing is ours."""
        return _HERE.get()

    @contextmanager
    def inside(self, layer: int, module: Any = None) -> Iterator[Here]:
        """On the way through the experts of ``layer``."""
        found = Here(layer, module)
        token = _HERE.set(found)
        try:
            yield found
        finally:
            _HERE.reset(token)

    def rows(self, packed: Tensor, scales: Tensor, scale: Tensor, *, encode: bool, tiled: bool = False) -> None:
        """The experts' input, token by token.

        Args:
            packed: ``(T, at least width / 2)``.
            scales: block scales row by row, or in tiles.
            scale: global scale, the same for all tokens (the kernel reads the first element) or ``(T,)``.
            encode: whether values are multiplied by ``scale``; else products are.
            tiled: layout of ``scales``.
        """
        recorder = self.recorder()
        if self.here is None or recorder is None:
            return
        width = recorder.layout.hidden
        rows, columns = packed.numel() // packed.shape[-1], packed.shape[-1] // 8
        codes = packed.view(torch.uint8).reshape(rows, -1)
        found = linear_scales(scales, rows, columns) if tiled else scales.view(torch.uint8).reshape(rows, columns)
        flat = scale.reshape(-1)
        self._observe(Kind.EXPERTS_IN, codes, found, flat if flat.numel() == rows else flat[:1], encode, width, None)

    def grouped(self, kind: Kind, packed: Tensor, scales: Tensor, scale: Tensor, *, batched: bool = False) -> None:
        """An input of the experts, expert by expert; its global scales are what values are multiplied by.

        Args:
            kind: which input.
            packed: ``(rows, width / 2)``; batched ``(capacity, width / 2, E)``.
            scales: in tiles; batched under CuteDSL's six axes.
            scale: ``(E,)`` global scale of each expert, or one.
            batched: bins instead of sorted rows.

        Raises:
            EngineError: the order of the rows is not known, or a token has no single input.
        """
        here, recorder = self.here, self.recorder()
        if here is None or recorder is None:
            return
        if here.grouped is None:
            raise EngineError(f"layer {here.layer}: experts were rounded in an order that was not announced")
        layout, order = recorder.layout, here.grouped
        if kind == Kind.EXPERTS_IN:
            self._check_shared(here.layer, scale)
            order = Grouped(*(part[:: layout.top_k] for part in (order.rows, order.scale_rows, order.experts)))
        width = layout.hidden if kind == Kind.EXPERTS_IN else layout.intermediate
        if batched:
            packed, scales = packed.view(torch.uint8).permute(2, 0, 1), from_matrix_view(scales)
        codes = packed.view(torch.uint8).reshape(-1, packed.shape[-1])
        found = tiled_rows(scales, order.scale_rows, codes.shape[1] // 8)
        flat = scale.reshape(-1)
        flat = flat if flat.numel() == 1 else flat[order.experts]
        pairs = None if kind == Kind.EXPERTS_IN else torch.arange(order.rows.numel(), device=codes.device)
        self._observe(kind, codes[order.rows], found, flat, True, width, pairs)

    def _check_shared(self, layer: int, scale: Tensor) -> None:
        """Looked at once for each layer: it waits for the device."""
        if layer not in self._shared:
            self._shared[layer] = bool((scale == scale.reshape(-1)[0]).all())
        if not self._shared[layer]:
            raise EngineError(
                f"layer {layer}: experts round the same token by different input scales, so it has no single code; "
                "export the checkpoint with one input scale for all experts of a layer"
            )

    def _observe(
        self, kind: Kind, codes: Tensor, scales: Tensor, scale: Tensor, encode: bool, width: int, pairs: Tensor | None
    ) -> None:
        here, recorder = self.here, self.recorder()
        numerics = None if recorder is None else recorder.spec.activations
        if here is None or recorder is None or numerics is None:
            return
        value = scale.float()
        if encode != (numerics.global_form == "encode"):
            value = torch.reciprocal(value)
        found = Quantized(
            e2m1.unpack(codes[:, : width // 2]),
            scales[:, : width // numerics.block].contiguous(),
            value.reshape(-1, 1).expand(codes.shape[0], 1).contiguous(),
            numerics,
        )
        recorder.observe(Site(here.layer, kind), found, pairs)
