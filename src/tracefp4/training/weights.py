"""The trainer's expert weights, quantized once for as long as they do not change.

A weight is quantized with the numerics that the engine uses for it. Its operand then serves every micro-batch up to
the next optimizer step, each layer twice under gradient checkpointing. What is kept in between is a choice:

``widened``   the bfloat16 operand, 2 bytes a value (float32 on a CPU, where products widen their operands anyway)
``packed``    codes and scales, 0.56 bytes in NVFP4, and the operands of the layer in flight; a layer is widened when
              its forward pass begins and once more before its backward pass

Layers that the spec leaves in bfloat16 are asked for by :attr:`WeightOperands.plain`: their weights are their operands.

Whether a weight has changed is what PyTorch's count of in-place changes tells. A sharded model gathers its weights
again and again without a change and without counting; there the optimizer says so (:meth:`WeightOperands.manage`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError
from tracefp4.formats.numerics import Numerics
from tracefp4.models.operands import widened
from tracefp4.models.packing import PackedWeight, pack_weight, weight_operand
from tracefp4.models.sites import Operand

Cache = Literal["widened", "packed"]

IN_FLIGHT = 2
"""Operands that ``packed`` keeps: both projections of one layer."""

_Stamp = tuple[int, ...]


class WeightOperands:
    """Operands of expert projections under one numerics.

    Args:
        numerics: weight numerics of the trainer's spec; ``None`` leaves weights in bfloat16.
        cache: what is kept of quantized weights; elements of eight bits have no packed form and are kept widened.
    """

    def __init__(self, numerics: Numerics | None, cache: Cache = "widened") -> None:
        self.numerics = numerics
        self.cache: Cache = cache if numerics is not None and numerics.element == "e2m1" else "widened"
        self._packed: dict[tuple[int, str], tuple[_Stamp, PackedWeight]] = {}
        self._operands: OrderedDict[tuple[int, str], tuple[_Stamp, Operand]] = OrderedDict()
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._version: int | None = None
        self._generation = 0
        self._plain = None if numerics is None else WeightOperands(None)

    @property
    def plain(self) -> WeightOperands:
        """Operands of the layers that are not quantized."""
        return self if self._plain is None else self._plain

    @property
    def generation(self) -> int:
        """Grows when operands that somebody may read from where they lie are given up.

        Widened ones are not: those of changed weights are written over them.
        """
        return self._generation + (0 if self._plain is None else self._plain.generation)

    def manage(self) -> None:
        """From now on weights change when :meth:`renew` says so, and never otherwise."""
        self._version = 0
        if self._plain is not None:
            self._plain.manage()

    def renew(self) -> None:
        """Weights have changed. Of no effect unless they are managed."""
        if self._version is not None:
            self._version += 1
        if self._plain is not None:
            self._plain.renew()

    def get(self, module: nn.Module, projection: str) -> Operand:
        """Operand ``(E, out, in)`` of ``module.<projection>``, quantized anew only after the weight changed."""
        weight: Tensor = getattr(module, projection)
        transposed = bool(getattr(module, "is_transposed", False))
        if self.numerics is None and self._version is not None:
            # Gathered memory is given back after the layer: nothing may hold on to it.
            return _as_is(weight.detach(), transposed)
        key, stamp = (id(module), projection), self._stamp(weight)
        kept = self._operands.get(key)
        if kept is not None and kept[0] == stamp:
            self._operands.move_to_end(key)
            return kept[1]
        operand = widened(self._make(key, stamp, weight.detach(), transposed))
        if kept is not None:
            operand = self._renewed(kept[1], operand)
        self._operands[key], self._modules[id(module)] = (stamp, operand), weakref.ref(module)
        if self.cache == "packed" and len(self._operands) > IN_FLIGHT:
            self._operands.popitem(last=False)
            self._generation += 1
        return operand

    def refresh(self) -> None:
        """Quantize anew every kept operand whose weight has changed, for readers that do not ask."""
        for module, projection in self._kept():
            self.get(module, projection)
        if self._plain is not None:
            self._plain.refresh()

    def stale(self) -> bool:
        """Whether :meth:`refresh` would change anything."""
        changed = any(
            self._operands[id(module), projection][0] != self._stamp(getattr(module, projection))
            for module, projection in self._kept()
        )
        return changed or (self._plain is not None and self._plain.stale())

    @property
    def rewritable(self) -> bool:
        """Whether :meth:`rewrite` does what :meth:`refresh` does: operands are quantized, and kept where they lie."""
        return self.numerics is not None and self.cache == "widened" and bool(self._operands) and not self._packed

    def rewrite(self) -> None:
        """Quantize anew every kept operand in its place, changed or not, and note nothing: for a CUDA graph to repeat.

        Whoever repeats it says so to :meth:`rewritten`.
        """
        for module, projection in self._kept():
            weight: Tensor = getattr(module, projection)
            transposed = bool(getattr(module, "is_transposed", False))
            kept = self._operands[id(module), projection][1]
            if self.numerics is None:
                new = _as_is(weight.detach(), transposed)
            else:
                into = kept.values if kept.values.dtype is torch.bfloat16 else None
                new = weight_operand(weight.detach(), self.numerics, transposed=transposed, into=into)
            self._renewed(kept, widened(new))
        if self._plain is not None:
            self._plain.rewrite()

    def rewritten(self) -> None:
        """Every kept operand is that of its weight as it is now."""
        for module, projection in self._kept():
            key = (id(module), projection)
            self._operands[key] = (self._stamp(getattr(module, projection)), self._operands[key][1])
        if self._plain is not None:
            self._plain.rewritten()

    def _kept(self) -> list[tuple[nn.Module, str]]:
        """Modules that are still there, and the projections of theirs that operands are kept of."""
        found = [(self._modules[index](), projection) for index, projection in self._operands]
        return [(module, projection) for module, projection in found if module is not None]

    def _renewed(self, old: Operand, new: Operand) -> Operand:
        """``new``, at the addresses of ``old`` if that can be."""
        if new.values is not old.values and new.values.data_ptr() == old.values.data_ptr():
            return new
        parts = ((old.values, new.values), (old.scale, new.scale))
        same = all(a is b or (a is not None and b is not None and a.shape == b.shape) for a, b in parts)
        if self.cache == "packed" or not same or old.values.dtype is not new.values.dtype:
            self._generation += 1
            return new
        for target, source in parts:
            if target is not None and source is not None:
                target.copy_(source)  # of values that were written in place a copy to themselves, which is none
        return Operand(old.values, old.scale)

    def put(self, module: nn.Module, projection: str, packed: PackedWeight) -> None:
        """Serve ``packed`` for ``module.<projection>`` until that parameter changes, whatever it holds.

        Raises:
            ConfigError: other numerics.
        """
        if self.numerics is None or packed.numerics.hash != self.numerics.hash:
            mine = "bf16" if self.numerics is None else self.numerics.name
            raise ConfigError(f"{projection} is packed as {packed.numerics.name}, these weights are {mine}")
        key = (id(module), projection)
        self._packed[key] = (self._stamp(getattr(module, projection)), packed)
        self._operands.pop(key, None)
        self._generation += 1

    def tensors(self) -> list[Tensor]:
        """Everything that is kept beside the weights themselves."""
        packed = [part for _, weight in self._packed.values() for part in weight.parts()]
        return packed + ([] if self.numerics is None else [kept.values for _, kept in self._operands.values()])

    def nbytes(self) -> int:
        """Bytes of :meth:`tensors`."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def _stamp(self, weight: Tensor) -> _Stamp:
        if self._version is not None:
            return (self._version,)
        # Of the storage, not of the tensor: a leaf of its own over the same memory is the same weight.
        return (weight.untyped_storage()._cdata, weight.data_ptr(), weight._version)

    def _make(self, key: tuple[int, str], stamp: _Stamp, weight: Tensor, transposed: bool) -> Operand:
        if self.numerics is None:
            return _as_is(weight, transposed)
        kept = self._packed.get(key)
        if kept is None or kept[0] != stamp:
            if self.cache == "widened":
                self._packed.pop(key, None)  # what was put there stood for other values
                return weight_operand(weight, self.numerics, transposed=transposed)
            kept = self._packed[key] = (stamp, pack_weight(weight, self.numerics, transposed=transposed))
        operand = kept[1].operand()
        return operand if self.cache == "packed" else Operand(operand.values, operand.scale)


def _as_is(weight: Tensor, transposed: bool) -> Operand:
    """The operand of a weight that is not quantized."""
    return Operand(weight.transpose(1, 2).contiguous() if transposed else weight, None)
