"""The paged KV pool: where keys and values live as FP4 numbers.

A *slot* holds the K and V of one token in every layer; a *page* is ``page_size`` neighbouring slots. A sequence owns a
list of pages, so it grows without moving, and two sequences with the same prompt own the same pages. Three ideas make
up the whole memory management::

    slot(position) = pages[position // page_size] * page_size + position % page_size
    a page is free when its reference count is 0
    a page that is about to be written has exactly one owner: the last, partly filled page of a prompt is copied

What a slot stores is what an FP4 cache stores: packed codes, two a byte, and a scale byte for each block. Attention
reads nothing else, not even for the token that was written a moment ago. With ``spec.kv is None``, and in the layers
that the spec leaves out, a slot stores the values in the model's dtype. Layers of one format lie in one *stack*; how
the bytes of a slot are arranged there is the business of :mod:`tracefp4.rollout.plane`.

One page more than the engine may use is kept for *padding*: rows that fill up a batch write and read there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        spec: ``spec.kv`` quantizes the layers that it does not leave out; ``None`` stores ``dtype``.
        slots: slots in all, the padding page included.
        dtype: the model's dtype, in which :meth:`read` answers.
        device: where the pool lies.

    Raises:
        EngineError: KV numerics that a pool cannot store.
    """

    def __init__(self, layout: ModelLayout, spec: Spec, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        check_storable(spec)
        sizes, self._slots = layout.kv_sizes(), slots
        self.format = KVFormat.of(sizes, spec.kv, dtype, device)
        quantized = [layer for layer in layout.kv_layers if spec.kv is None or spec.quantizes(layer)]
        rest = [layer for layer in layout.kv_layers if layer not in quantized]
        self._stack = _Stack.of(self.format, quantized, slots, device)
        self._stacks = [self._stack]
        if rest:
            self._stacks.append(_Stack.of(KVFormat.of(sizes, None, dtype, device), rest, slots, device))
        self._planes = {layer: plane for stack in self._stacks for layer, plane in stack.planes()}

    @property
    def numerics(self) -> Numerics | None:
        """``None`` if the pool is not quantized."""
        return self.format.numerics

    @property
    def for_kernels(self) -> bool:
        """Stored for the attention kernels: codes in words, scales recoded."""
        return self.format.for_kernels

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
            EngineError: a layer is not quantized.
        """
        codes, scales, index = self._stack.codes, self._stack.scales, self._stack.index
        plain = [layer for layer in layers if scales is None or layer not in index]
        if plain or scales is None:
            raise EngineError(f"layer {plain[0]} stores {kind} in {self.format.dtype}: there are no codes to read")
        first = np.array([index[layer] for layer in layers], np.int64)[:, None] * self._slots
        lines = (upload(first, scales.device) + slots.to(scales.device)).flatten()
        whole = KVPlane(self.format, codes.flatten(0, 1), scales.flatten(0, 1))
        codes, scales = whole.stored(kind, lines)
        return codes.unflatten(0, (len(layers), -1)), scales.unflatten(0, (len(layers), -1))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy all layers of slots ``source (n,)`` to slots ``target (n,)``; the two must not overlap."""
        for tensor in self._tensors():
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    def _tensors(self) -> list[Tensor]:
        return [t for stack in self._stacks for t in (stack.codes, stack.scales) if t is not None]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Layers of one format, side by side so that one gather reads them all."""

    format: KVFormat
    index: dict[int, int]
    """Place of each layer in the stack."""
    codes: Tensor
    """``(layers, slots, n)`` codes, or values."""
    scales: Tensor | None
    """uint8 ``(layers, slots, m)``; ``None`` for values."""

    @classmethod
    def of(cls, form: KVFormat, layers: Sequence[int], slots: int, device: torch.device) -> _Stack:
        """Empty room for ``layers``."""
        width, index = form.code_bytes // form.code_dtype.itemsize, {layer: i for i, layer in enumerate(layers)}
        codes, scales = torch.zeros(len(layers), slots, width, dtype=form.code_dtype, device=device), None
        if form.numerics is not None:
            scales = torch.zeros(len(layers), slots, form.scale_bytes, dtype=torch.uint8, device=device)
        return cls(form, index, codes, scales)

    def planes(self) -> Iterator[tuple[int, KVPlane]]:
        """Each layer and its plane."""
        for layer, i in self.index.items():
            yield layer, KVPlane(self.format, self.codes[i], None if self.scales is None else self.scales[i])
