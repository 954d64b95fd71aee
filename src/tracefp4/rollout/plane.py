"""How the K and V of one layer lie in memory, and what is done to them there.

A *plane* has a row for each slot. What a row holds is a :class:`KVFormat`: packed codes, two a byte, and a scale byte
for each block, or plain values. There are two arrangements of the same bytes::

    plain          kind after kind, and vector after vector; codes packed as everywhere else
    for kernels    head after head, each with its K and its V; codes in words, scales recoded (formats.words)

The second is what attention kernels read by themselves; a head's K and V lie side by side because they are read
together. :meth:`KVPlane.stored` returns plain codes and scales of both. A plane does not own its memory: the engine's
pool cuts one out of a tensor of its own for each layer, and a plugin lays one over the pages of another engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracefp4.core import Kind
from tracefp4.errors import EngineError
from tracefp4.formats import e2m1, words
from tracefp4.formats.blocks import Quantized, decode_scales
from tracefp4.formats.fused import rules
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.tables import on_device
from tracefp4.kernels.runtime import usable
from tracefp4.quantizers.nearest import quantize_nearest

if TYPE_CHECKING:
    from tracefp4.kernels.attention_decode import PagedKV

KERNEL_WIDTHS = (64, 128, 256)
"""Values of a vector that attention kernels take."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What a slot holds of a layer."""

    sizes: Mapping[Kind, tuple[int, int]]
    """``(vectors, width)`` by kind, in the order of a plain row."""
    numerics: Numerics | None
    """``None`` stores values of :attr:`dtype`."""
    dtype: torch.dtype
    """Of the model: what is read comes in it."""
    for_kernels: bool
    """Which of the two arrangements."""

    @classmethod
    def of(
        cls, sizes: Mapping[Kind, tuple[int, int]], numerics: Numerics | None, dtype: torch.dtype, device: torch.device
    ) -> KVFormat:
        """The format of a cache on ``device``: for kernels where they run and take these sizes."""
        k, v = sizes.get(Kind.K), sizes.get(Kind.V)
        kernels = dtype is torch.bfloat16 and usable(torch.empty(0, device=device))
        fits = Kind.LATENT not in sizes and k is not None and k == v and k[1] in KERNEL_WIDTHS
        return cls(sizes, numerics, dtype, kernels and fits)

    @property
    def values(self) -> int:
        """Values of a row."""
        return sum(vectors * width for vectors, width in self.sizes.values())

    @property
    def code_dtype(self) -> torch.dtype:
        """Of codes, or of values."""
        if self.numerics is None:
            return self.dtype
        return torch.int16 if self.for_kernels else torch.uint8

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes, or of its values."""
        return self.values // 2 if self.numerics is not None else self.values * self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales."""
        return 0 if self.numerics is None else self.values // self.numerics.block

    def columns(self, kinds: list[Kind]) -> slice:
        """Values of ``kinds``, which follow one another, in a plain row."""
        starts, width = dict[Kind, slice](), 0
        for kind, (vectors, size) in self.sizes.items():
            starts[kind] = slice(width, width + vectors * size)
            width += vectors * size
        return slice(starts[kinds[0]].start, starts[kinds[-1]].stop)


@dataclass(frozen=True, slots=True)
class KVPlane:
    """Memory of one layer, or of several one after the other."""

    format: KVFormat
    codes: Tensor
    """``(slots, n)`` codes, or values; the last axis dense."""
    scales: Tensor | None
    """uint8 ``(slots, m)``; ``None`` for values."""

    def paged(self, page_size: int) -> PagedKV | None:
        """What attention kernels read, or ``None`` if it is not stored for them."""
        if not self.format.for_kernels:
            return None
        from tracefp4.kernels.attention_decode import PagedKV

        (heads, width), n = self.format.sizes[Kind.K], self.format.numerics
        if n is None:
            return PagedKV(self.codes, None, heads, width, page=page_size)
        return PagedKV(self.codes, self.scales, heads, width, n.scale_format == "e8m0", n.block, page_size)

    def write(self, slots: Tensor, parts: Mapping[Kind, Tensor]) -> Quantized | None:
        """Quantize and store.

        Args:
            slots: ``(T,)`` int64.
            parts: ``(T, vectors, width)`` by kind, kinds that follow one another in the format.

        Returns:
            What was stored, the parts side by side ``(T, values)``; ``None`` if nothing is quantized, or a kernel
            stored it.
        """
        n = self.format.numerics
        kv = self.paged(1)
        if kv is not None:
            from tracefp4.kernels.kv_append import append

            made = None if n is None else rules(n)
            append(parts[Kind.K].to(self.format.dtype), parts[Kind.V].to(self.format.dtype), kv, made, slots)
            return None
        kinds = [kind for kind in self.format.sizes if kind in parts]
        rows = torch.cat([parts[kind].flatten(1) for kind in kinds], dim=1).to(self.format.dtype)
        at = self.format.columns(kinds)
        if self.scales is None or n is None:
            self.codes[:, at].index_copy_(0, slots, rows)
            return None
        q, block = quantize_nearest(rows, n), n.block
        self.codes[:, at.start // 2 : at.stop // 2].index_copy_(0, slots, e2m1.pack(q.codes))
        self.scales[:, at.start // block : at.stop // block].index_copy_(0, slots, q.scales)
        return q

    def write_heads(
        self, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, turn: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor, float, bool] | None,
    ) -> Tensor | None:  # fmt: skip
        """Normalise and turn queries and keys, quantize and store keys and values, all in one launch.

        Arguments are those of :func:`tracefp4.kernels.kv_append.append_heads`.

        Returns:
            Queries ``(T, Hq, D)``; ``None`` where there is no kernel for it, and nothing was stored.
        """
        kv, n = self.paged(1), self.format.numerics
        given = (q, k, v, *turn, *(norms or ())[:2])
        if kv is None or any(x.dtype is not self.format.dtype for x in given):
            return None
        from tracefp4.kernels.kv_append import append_heads

        return append_heads(q, k, v, kv, None if n is None else rules(n), slots, turn, norms)

    def read(self, slots: Tensor) -> dict[Kind, Tensor]:
        """Gather and dequantize ``slots (...)``: ``(..., vectors, width)`` for every kind, in the format's dtype."""
        flat, n = slots.reshape(-1), self.format.numerics
        rows = self.codes.index_select(0, flat)
        if self.scales is not None and n is not None:
            rows, scales = self._plain(rows, self.scales.index_select(0, flat))
            rows = dequantize_packed(rows, scales, n, self.format.dtype)
        return {kind: self._vectors(rows, kind).unflatten(0, slots.shape) for kind in self.format.sizes}

    def stored(self, kind: Kind, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Packed codes ``(T, vectors, width / 2)`` and scale bytes ``(T, vectors, width / block)`` of ``slots (T,)``.

        Raises:
            EngineError: nothing is quantized.
        """
        if self.scales is None:
            raise EngineError(f"{kind} is stored in {self.format.dtype}: there are no codes to read")
        lines = slots.to(self.scales.device)
        codes, scales = (self._vectors(part, kind).index_select(0, lines) for part in (self.codes, self.scales))
        return self._plain(codes, scales)

    def _vectors(self, rows: Tensor, kind: Kind) -> Tensor:
        """The vectors ``(T, vectors, n)`` of one kind in rows ``(T, columns)`` of codes, scales or values; a view."""
        vectors = self.format.sizes[kind][0]
        if self.format.for_kernels:
            return rows.unflatten(1, (vectors, 2, -1))[:, :, int(kind == Kind.V)]
        columns, part = self.format.columns([kind]), self.format.values // rows.shape[1]
        return rows[:, columns.start // part : columns.stop // part].unflatten(1, (vectors, -1))

    def _plain(self, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Packed codes and scale bytes of stored rows, whatever their arrangement."""
        n = self.format.numerics
        if not self.format.for_kernels or n is None:
            return codes, scales
        return words.to_packed(codes), words.restore(scales) if n.scale_format == "e4m3" else scales


def dequantize_packed(packed: Tensor, scales: Tensor, numerics: Numerics, dtype: torch.dtype) -> Tensor:
    """Values of packed FP4 codes, equal to unpacking and :meth:`Quantized.dequantize` bit for bit.

    A byte holds two codes, so one read from a table of 256 pairs decodes both; in bfloat16 a pair is one 32-bit word.

    Args:
        packed: uint8 ``(..., D / 2)``.
        scales: uint8 ``(..., D / block)``.
        numerics: E2M1 elements without a global scale of their own.
        dtype: of the result.

    Returns:
        ``(..., D)``.
    """
    if dtype is not torch.bfloat16 or numerics.scope not in ("constant", "none") or numerics.constant != 1.0:
        return Quantized(e2m1.unpack(packed), scales, None, numerics).dequantize(dtype)
    pairs = on_device(_pair_table, packed.device)
    values = pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.bfloat16)
    values = values.view(*scales.shape, numerics.block)
    factor = decode_scales(scales, numerics, dtype).unsqueeze(-1)
    if factor.device.type == "cpu":
        # PyTorch multiplies by a broadcast last axis of one element several times slower than by a copy of it.
        factor = factor.expand(values.shape).contiguous()
    return values.mul_(factor).flatten(-2)


def _pair_table() -> Tensor:
    """The two bfloat16 values of each byte, as one int32 word: ``(256,)``."""
    pairs = e2m1.decode(e2m1.unpack(torch.arange(256, dtype=torch.uint8).unsqueeze(-1)), torch.bfloat16)
    return pairs.contiguous().view(torch.int32).reshape(-1)
