"""The paged KV pool: where keys and values live as FP4 numbers.

A *slot* holds the K and V of one token in every layer; a *page* is ``page_size`` neighbouring slots. A sequence owns a
list of pages, so it grows without moving, and two sequences with the same prompt own the same pages. Three ideas make
up the whole memory management::

    slot(position) = pages[position // page_size] * page_size + position % page_size
    a page is free when its reference count is 0
    a page that is about to be written has exactly one owner: the last, partly filled page of a prompt is copied

What a slot stores is what an FP4 cache stores: packed codes, two a byte, and a scale byte for each block. Attention
reads nothing else, not even for the token that was written a moment ago. With ``spec.kv is None`` a slot stores the
values in the model's dtype. How the bytes of a slot are arranged is the business of :mod:`tracefp4.rollout.plane`.

One page more than the engine may use is kept for *padding*: rows that fill up a batch write and read there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from tracefp4.core import Kind
from tracefp4.errors import EngineError
from tracefp4.formats.blocks import Quantized
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import Spec
from tracefp4.models.layout import ModelLayout
from tracefp4.rollout.plane import KVFormat, KVPlane
from tracefp4.rollout.upload import upload

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
        self.format = KVFormat.of(kv_sizes(layout), spec.kv, dtype, device)
        self._slots = slots
        self._codes, self._scales = self._allocate(len(layout.kv_layers), slots, device)
        self._index = {layer: i for i, layer in enumerate(layout.kv_layers)}
        self._planes = {
            layer: KVPlane(self.format, self._codes[i], None if self._scales is None else self._scales[i])
            for layer, i in self._index.items()
        }

    @property
    def numerics(self) -> Numerics | None:
        """``None`` if the pool is not quantized."""
        return self.format.numerics

    @property
    def for_kernels(self) -> bool:
        """Stored for the attention kernels: codes in words, scales recoded."""
        return self.format.for_kernels

    def _allocate(self, layers: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Codes (or values) and scales of all layers, side by side so that one gather reads them all."""
        form = self.format
        width = form.code_bytes // form.code_dtype.itemsize
        codes = torch.zeros(layers, slots, width, dtype=form.code_dtype, device=device)
        if form.numerics is None:
            return codes, None
        return codes, torch.zeros(layers, slots, form.scale_bytes, dtype=torch.uint8, device=device)

    def paged(self, layer: int, page_size: int) -> PagedKV | None:
        """What attention kernels read of a layer, or ``None`` if the pool is not stored for them."""
        return self._planes[layer].paged(page_size)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    @property
    def token_bytes(self) -> int:
        """Bytes of one slot in all layers."""
        return self.nbytes // self._slots

    def write(self, layer: int, slots: Tensor, parts: Mapping[Kind, Tensor]) -> Quantized | None:
        """Quantize and store in decoder layer ``layer``; see :meth:`KVPlane.write`."""
        return self._planes[layer].write(slots, parts)

    def write_heads(
        self, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, turn: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor, float, bool] | None,
    ) -> Tensor | None:  # fmt: skip
        """Store in decoder layer ``layer`` what was projected, and return queries; see :meth:`KVPlane.write_heads`."""
        return self._planes[layer].write_heads(slots, q, k, v, turn, norms)

    def read(self, layer: int, slots: Tensor) -> dict[Kind, Tensor]:
        """Gather and dequantize ``slots (...)``: ``(..., vectors, width)`` for every kind, in the pool's dtype."""
        return self._planes[layer].read(slots)

    def stored(self, layers: Sequence[int], kind: Kind, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What ``slots (T,)`` of ``L`` layers store.

        Returns:
            packed codes ``(L, T, vectors, width / 2)`` and scale bytes ``(L, T, vectors, width / block)``.

        Raises:
            EngineError: the pool is not quantized.
        """
        if self._scales is None:
            raise EngineError(f"layer {layers[0]} stores {kind} in {self.format.dtype}: there are no codes to read")
        first = np.array([self._index[layer] for layer in layers], np.int64)[:, None] * self._scales.shape[1]
        lines = (upload(first, self._scales.device) + slots.to(self._scales.device)).flatten()
        whole = KVPlane(self.format, self._codes.flatten(0, 1), self._scales.flatten(0, 1))
        codes, scales = whole.stored(kind, lines)
        return codes.unflatten(0, (len(layers), -1)), scales.unflatten(0, (len(layers), -1))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy all layers of slots ``source (n,)`` to slots ``target (n,)``; the two must not overlap."""
        for tensor in self._tensors():
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    def _tensors(self) -> list[Tensor]:
        return [t for t in (self._codes, self._scales) if t is not None]
