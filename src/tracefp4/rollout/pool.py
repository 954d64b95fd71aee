"""The paged KV pool: where keys and values live as FP4 numbers.

A *slot* holds the K and V of one token in every layer; a *page* is ``page_size`` neighbouring slots. A sequence owns a
list of pages, so it grows without moving, and two sequences with the same prompt own the same pages. Three ideas make
up the whole memory management::

    slot(position) = pages[position // page_size] * page_size + position % page_size
    a page is free when its reference count is 0
    a page that is about to be written has exactly one owner: the last, partly filled page of a prompt is copied

What a slot stores is what an FP4 cache stores: packed codes, two a byte, and a scale byte for each block. Attention
reads nothing else, not even for the token that was written a moment ago. With ``spec.kv is None`` a slot stores the
values in the model's dtype. Where attention is a kernel that reads the pool by itself (:attr:`KVPool.for_kernels`),
codes and scales are arranged for it (:mod:`tracefp4.formats.words`) and a head's K and V lie side by side, because
they are read together; what :meth:`KVPool.stored` returns is the same.

One page more than the engine may use is kept for *padding*: rows that fill up a batch write and read there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tracefp4.core import Kind
from tracefp4.errors import EngineError
from tracefp4.formats import e2m1, words
from tracefp4.formats.blocks import Quantized, decode_scales
from tracefp4.formats.fused import rules
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import Spec
from tracefp4.formats.tables import on_device
from tracefp4.kernels.runtime import usable
from tracefp4.models.layout import ModelLayout
from tracefp4.quantizers.nearest import quantize_nearest

if TYPE_CHECKING:
    from tracefp4.kernels.attention_decode import PagedKV


class PageAllocator:
    """Hands out pages and counts their owners. Plain host bookkeeping; the memory itself is :class:`KVPool`'s.

    Args:
        num_pages: pages that may be handed out, ``0..num_pages-1``. Page ``num_pages`` is the padding page.
        page_size: slots a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages

    @property
    def free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def padding_page(self) -> int:
        """The page of rows that only fill up a batch."""
        return self.num_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free pages, each with one owner.

        Raises:
            EngineError: fewer are free; the scheduler asks before it takes.
        """
        if count > len(self._free):
            raise EngineError(f"the KV pool has {len(self._free)} free pages, {count} were asked for")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each page."""
        for page in pages:
            if not self._owners[page]:
                raise EngineError(f"page {page} of the KV pool is free and cannot be shared")
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take an owner from each page; without owners it is free."""
        for page in pages:
            if not self._owners[page]:
                raise EngineError(f"page {page} of the KV pool was released twice")
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def slots(self, pages: list[int], start: int, stop: int) -> list[int]:
        """Slots of the positions ``start..stop-1`` of a sequence that owns ``pages``."""
        size = self.page_size
        return [pages[p // size] * size + p % size for p in range(start, stop)]


def kv_sizes(layout: ModelLayout) -> dict[Kind, tuple[int, int]]:
    """``(vectors, width)`` of what a layer caches for a token: K and V, or the latent and the rotated key part."""
    if layout.latent_rank is not None and layout.rope_dim is not None:
        return {Kind.LATENT: (1, layout.latent_rank), Kind.K: (1, layout.rope_dim)}
    return {Kind.K: (layout.kv_heads, layout.head_dim), Kind.V: (layout.kv_heads, layout.v_head_dim)}


def check_storable(spec: Spec) -> None:
    """Refuse numerics that a pool cannot store.

    Raises:
        EngineError: K and V in another element format, or under a global scale that is made from values.
    """
    if spec.kv is not None and (spec.kv.scope in ("token", "tensor") or spec.kv.element != "e2m1"):
        raise EngineError(
            f"the KV pool stores FP4 codes under a constant global scale; {spec.kv.name!r} has {spec.kv.element} "
            f"elements and a global scale of scope {spec.kv.scope!r}"
        )


class StoredKV(Protocol):
    """What a finished request's K and V are read from."""

    def stored(self, layers: Sequence[int], kind: Kind, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`KVPool.stored`."""
        ...


@dataclass(frozen=True, slots=True)
class _Plane:
    """View of one layer: codes (or values) and scales, first axis the slot.

    Then kind after kind and vector after vector or, for kernels, head after head, each with its K and its V.
    """

    codes: Tensor
    scales: Tensor | None


class KVPool:
    """Slot-indexed storage of every layer's K and V.

    A token's vectors of all kinds lie side by side, so that they are quantized, written and read as one row: blocks run
    along a vector and never across two, and there is no global scale that could tie them together.

    Args:
        layout: which layers have a cache, and its sizes.
        spec: ``spec.kv`` quantizes; ``None`` stores ``dtype``.
        slots: slots in all, the padding page included.
        dtype: the model's dtype, in which :meth:`read` answers.
        device: where the pool lies.

    Raises:
        EngineError: KV numerics that a pool cannot store.
    """

    def __init__(self, layout: ModelLayout, spec: Spec, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        check_storable(spec)
        self.numerics, self.dtype, self.sizes, self._slots = spec.kv, dtype, kv_sizes(layout), slots
        self.for_kernels = self._takes_kernels(dtype, device)
        """Stored for the attention kernels: codes in words, scales recoded."""
        self._columns: dict[Kind, slice] = {}
        """Values of each kind in a row."""
        width = 0
        for kind, (vectors, size) in self.sizes.items():
            self._columns[kind] = slice(width, width + vectors * size)
            width += vectors * size
        self._codes, self._scales = self._allocate(len(layout.kv_layers), slots, width, device)
        self._index = {layer: i for i, layer in enumerate(layout.kv_layers)}
        self._planes = {
            layer: _Plane(self._codes[i], None if self._scales is None else self._scales[i])
            for layer, i in self._index.items()
        }

    def _allocate(self, layers: int, slots: int, width: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Codes (or values) and scales of all layers, side by side so that one gather reads them all."""
        n = self.numerics
        if n is None:
            return torch.zeros(layers, slots, width, dtype=self.dtype, device=device), None
        codes = torch.zeros(layers, slots, width // 2, dtype=torch.uint8, device=device)
        if self.for_kernels:
            codes = codes.view(torch.int16)
        return codes, torch.zeros(layers, slots, width // n.block, dtype=torch.uint8, device=device)

    def _takes_kernels(self, dtype: torch.dtype, device: torch.device) -> bool:
        k, v = self.sizes.get(Kind.K), self.sizes.get(Kind.V)
        if dtype is not torch.bfloat16 or not usable(torch.empty(0, device=device)):
            return False
        return Kind.LATENT not in self.sizes and k is not None and k == v and k[1] in (64, 128, 256)

    def paged(self, layer: int, page_size: int) -> PagedKV | None:
        """What attention kernels read of a layer, or ``None`` if the pool is not stored for them."""
        if not self.for_kernels:
            return None
        from tracefp4.kernels.attention_decode import PagedKV

        plane, (heads, width), n = self._planes[layer], self.sizes[Kind.K], self.numerics
        if n is None:
            return PagedKV(plane.codes, None, heads, width, page=page_size)
        return PagedKV(plane.codes, plane.scales, heads, width, n.scale_format == "e8m0", n.block, page_size)

    def _append(self, layer: int, slots: Tensor, parts: Mapping[Kind, Tensor]) -> bool:
        """Quantize and store by kernel; whether there is one."""
        kv = self.paged(layer, 1)
        if kv is None:
            return False
        from tracefp4.kernels.kv_append import append

        made = None if self.numerics is None else rules(self.numerics)
        for kind, x in parts.items():
            append(x.to(self.dtype), kv, made, slots, values=kind == Kind.V)
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    @property
    def token_bytes(self) -> int:
        """Bytes of one slot in all layers."""
        return self.nbytes // self._slots

    def write(self, layer: int, slots: Tensor, parts: Mapping[Kind, Tensor]) -> Quantized | None:
        """Quantize and store.

        Args:
            layer: decoder layer.
            slots: ``(T,)`` int64.
            parts: ``(T, vectors, width)`` by kind, kinds that follow one another in :attr:`sizes`.

        Returns:
            What was stored, the parts side by side ``(T, values)``; ``None`` if the pool is not quantized, or a kernel
            stored it.
        """
        if self._append(layer, slots, parts):
            return None
        plane, kinds = self._planes[layer], [kind for kind in self.sizes if kind in parts]
        rows = torch.cat([parts[kind].flatten(1) for kind in kinds], dim=1).to(self.dtype)
        start, stop = self._columns[kinds[0]].start, self._columns[kinds[-1]].stop
        if plane.scales is None or self.numerics is None:
            plane.codes[:, start:stop].index_copy_(0, slots, rows)
            return None
        q, block = quantize_nearest(rows, self.numerics), self.numerics.block
        plane.codes[:, start // 2 : stop // 2].index_copy_(0, slots, e2m1.pack(q.codes))
        plane.scales[:, start // block : stop // block].index_copy_(0, slots, q.scales)
        return q

    def read(self, layer: int, slots: Tensor) -> dict[Kind, Tensor]:
        """Gather and dequantize ``slots (...)``: ``(..., vectors, width)`` for every kind, in the pool's dtype."""
        plane, flat = self._planes[layer], slots.reshape(-1)
        rows = plane.codes.index_select(0, flat)
        if plane.scales is not None and self.numerics is not None:
            scales = plane.scales.index_select(0, flat)
            rows, scales = self._plain(rows, scales)
            rows = dequantize_packed(rows, scales, self.numerics, self.dtype)
        return {kind: self._vectors(rows, kind).unflatten(0, slots.shape) for kind in self.sizes}

    def _vectors(self, rows: Tensor, kind: Kind) -> Tensor:
        """The vectors ``(T, vectors, n)`` of one kind in rows ``(T, columns)`` of codes, scales or values; a view."""
        vectors = self.sizes[kind][0]
        if self.for_kernels:
            return rows.unflatten(1, (vectors, 2, -1))[:, :, int(kind == Kind.V)]
        total = sum(count * width for count, width in self.sizes.values())
        columns, part = self._columns[kind], total // rows.shape[1]
        return rows[:, columns.start // part : columns.stop // part].unflatten(1, (vectors, -1))

    def stored(self, layers: Sequence[int], kind: Kind, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What ``slots (T,)`` of ``L`` layers store.

        Returns:
            packed codes ``(L, T, vectors, width / 2)`` and scale bytes ``(L, T, vectors, width / block)``.

        Raises:
            EngineError: the pool is not quantized.
        """
        if self._scales is None or self.numerics is None:
            raise EngineError(f"layer {layers[0]} stores {kind} in {self.dtype}: there are no codes to read")
        index = torch.tensor([self._index[layer] for layer in layers], device=self._scales.device).unsqueeze(1)
        lines = (index * self._scales.shape[1] + slots.to(self._scales.device)).flatten()
        codes, scales = (
            self._vectors(stored.flatten(0, 1), kind).index_select(0, lines).unflatten(0, (len(layers), -1))
            for stored in (self._codes, self._scales)
        )
        return self._plain(codes, scales)

    def _plain(self, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Packed codes and scale bytes of stored rows, whatever their arrangement."""
        if not self.for_kernels or self.numerics is None:
            return codes, scales
        plain = words.restore(scales) if self.numerics.scale_format == "e4m3" else scales
        return words.to_packed(codes), plain

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy all layers of slots ``source (n,)`` to slots ``target (n,)``; the two must not overlap."""
        for tensor in self._tensors():
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    def _tensors(self) -> list[Tensor]:
        return [t for t in (self._codes, self._scales) if t is not None]


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
    words = on_device(_pair_table, packed.device)
    values = words.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.bfloat16)
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
