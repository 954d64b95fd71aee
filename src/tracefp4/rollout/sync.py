"""New weights: quantized, put in place, and proved.

The trainer pushes its bfloat16 weights. Expert weights are packed to FP4 on arrival, one projection of one layer after
the other, unless the trainer has packed them itself. What is kept then depends on who multiplies:

- Where the grouped kernel does, the codes arranged for it and nothing else: 4.5 bits a weight. The parameter of the
  model keeps its name, shape and dtype for whoever looks at it, but one NaN stands for all its elements: the memory is
  free for K and V, and a product that reads it by mistake fails loudly.
- Elsewhere the packed codes, and the parameter is overwritten with their exact bfloat16 operand ``code x block scale``,
  the number that tensor cores would multiply.

What is kept stays where it is from sync to sync, because CUDA graphs hold its addresses.

The checksum covers every parameter: packed codes and scales of the experts, raw bytes of all others. It is equal to the
trainer's own (:func:`tracefp4.models.packing.model_digest`) if and only if both sides quantize the same weights.

Nothing here is atomic: a sync that fails half-way leaves a mixture behind, and the engine must not serve it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tracefp4.errors import SyncError, suggest
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.words import CHUNK
from tracefp4.kernels.runtime import usable
from tracefp4.models.kernel_weights import Aside, packed_again, put_arranged, put_aside, put_plain, refuse_inexact
from tracefp4.models.layout import ModelLayout
from tracefp4.models.packing import Digest, PackedWeight, check_packed, expert_weights, pack_weight
from tracefp4.models.repeated import Repeated, addresses

if TYPE_CHECKING:
    from tracefp4.kernels.experts import ExpertWeight

KernelWeights = dict[tuple[int, str], "ExpertWeight"]
"""Arranged weights by layer and projection."""

WeightScales = dict[tuple[int, str], Tensor | None]
"""FP32 scale ``(E,)`` by layer and projection."""


class WeightSync:
    """The weights of the engine's model.

    Args:
        model: the engine's own model; its expert parameters are overwritten or emptied.
        layout: where its experts are.
        numerics: of expert weights; ``None`` leaves them as they are.
        scales: where the global scales of quantized weights go, shared with the site objects.
        kernel_weights: where weights arranged for the grouped kernel go, likewise; ``None`` if nobody wants them.
        first: first layer whose experts are quantized; those before it are left as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        numerics: Numerics | None,
        scales: WeightScales,
        kernel_weights: KernelWeights | None = None,
        first: int = 0,
    ) -> None:
        self.numerics, self._scales, self._kernel_weights = numerics, scales, kernel_weights
        self._parameters = dict(model.named_parameters())
        self._others = _optional(model, self._parameters)
        self._experts: dict[str, tuple[int, str, bool]] = {}
        if numerics is not None:
            layers = {path: layer for layer, path in layout.experts.items()}
            for name, _, transposed in expert_weights(model, layout, first):
                path, _, projection = name.rpartition(".")
                self._experts[name] = (layers[path], projection, transposed)
        if kernel_weights is not None:
            _plain_kernel_weights(model, layout, kernel_weights, self._experts)
        self._packed: dict[str, PackedWeight] = {}
        self._aside: dict[str, Aside] = {}
        """Of the weights that are kept arranged."""
        self._multiplied = self._experts.keys() if self._has_kernels(layout) else ()
        refuse_inexact({name: self._put(name, self._parameters[name]) for name in self._experts})
        self._loads, self._digest = Repeated(), Digest()

    def _has_kernels(self, layout: ModelLayout) -> bool:
        """Whether the grouped kernel multiplies the quantized weights: both projections of every layer, or none."""
        if self._kernel_weights is None or layout.hidden % CHUNK or layout.intermediate % CHUNK:
            return False
        weights = [self._parameters[name] for name in self._experts]
        return all(usable(weight) and weight.dtype is torch.bfloat16 for weight in weights)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are kept, each storage once."""
        storages = {kept.untyped_storage().data_ptr(): kept.untyped_storage().nbytes() for kept in self._kept()}
        return sum(storages.values())

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor | PackedWeight]) -> int:
        """Put every tensor in place. An expert weight that comes packed is served as it is.

        Returns:
            Bytes of the parameters, as they came.

        Raises:
            SyncError: naming the first tensor that is missing, unknown, or of another shape or dtype.
        """
        self._check_names(state)
        tensors: dict[str, Tensor] = {}
        if type(state) is dict:  # in other mappings tensors are made one by one, when they are asked for
            tensors.update((name, found) for name, found in state.items() if isinstance(found, Tensor))
        stay = addresses(tensors.values()) if len(tensors) == len(state) else None
        if stay is not None:
            checked = {n: self._checked(n, tensors[n], p) for n, p in self._parameters.items()}
            exact = self._loads.run((stay, self._addresses()), lambda: self._put_all(checked))
            refuse_inexact(dict(zip(self._experts, exact, strict=False)))
            nbytes = sum(tensor.nbytes for tensor in checked.values())
        else:
            nbytes = self._put_each(state)
        for name, target in self._others.items():
            found = state.get(name)
            if isinstance(found, Tensor):
                tensor = self._checked(name, found, target)
                if any(target is parameter for parameter in self._parameters.values()):
                    self._check_tied(name, tensor, target)
                else:
                    target.copy_(tensor)
        return nbytes

    def _put_all(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Put all in place without waiting for the device; what is left to check, weight by weight."""
        names = [*self._experts, *(n for n in tensors if n not in self._experts)]
        # Of all expert weights or of none.
        return [exact for name in names if (exact := self._put(name, tensors[name])) is not None]

    def _put_each(self, state: Mapping[str, Tensor | PackedWeight]) -> int:
        nbytes, exact = 0, dict[str, Tensor | None]()
        for name in self._parameters:
            found = state[name]
            nbytes += found.nbytes
            if isinstance(found, PackedWeight):
                exact[name] = self._put_packed(name, found)
            else:
                exact[name] = self._put(name, self._checked(name, found, self._parameters[name]))
        refuse_inexact(exact)
        return nbytes

    def digest(self) -> str:
        """Checksum of what is in place."""
        return self._digest.of(self._all_parts, self._addresses())

    def _all_parts(self) -> dict[str, Iterable[Tensor]]:
        parts: dict[str, Iterable[Tensor]] = {name: (p.detach(),) for name, p in self._parameters.items()}
        # One after the other: packed bytes of all arranged weights at once would take as much memory as those do.
        return parts | {name: self._parts(name) for name in self._experts}

    def _kept(self) -> list[Tensor]:
        """Everything that holds weights."""
        kept = [*self._parameters.values(), *self._others.values()]
        kept += [part for packed in self._packed.values() for part in packed.parts()]
        kept += [part for part in self._scales.values() if part is not None]
        kept += [part for aside in self._aside.values() for part in aside if part is not None]
        for weight in (self._kernel_weights or {}).values():
            kept += [part for part in (weight.values, weight.scales, weight.alpha) if part is not None]
        return kept

    def _addresses(self) -> tuple[int, ...] | None:
        return addresses(self._kept())

    def _parts(self, name: str) -> Iterator[Tensor]:
        yield from self.packed(name).parts()

    def packed(self, name: str) -> PackedWeight:
        """Codes and scales of an expert weight.

        Raises:
            SyncError: no such weight is quantized.
        """
        if name not in self._experts or self.numerics is None:
            raise SyncError(f"{name!r} is no quantized weight{suggest(name, self._experts)}")
        if self._kernel_weights is not None and name in self._aside:
            layer, projection, _ = self._experts[name]
            return packed_again(self._kernel_weights[layer, projection], self._aside[name], self.numerics)
        return self._packed[name]

    def _put(self, name: str, tensor: Tensor) -> Tensor | None:
        """Put a weight in place; what :func:`refuse_inexact` is to be asked of it."""
        target = self._parameters[name]
        if name not in self._experts or self.numerics is None:
            if tensor is not target:
                target.detach().copy_(tensor)
            return None
        transposed = self._experts[name][2]
        return self._place(name, pack_weight(tensor.to(target.device), self.numerics, transposed=transposed))

    def _put_packed(self, name: str, packed: PackedWeight) -> Tensor | None:
        target = self._parameters[name]
        numerics, transposed = (self.numerics, self._experts[name][2]) if name in self._experts else (None, False)
        check_packed(name, packed, numerics, tuple(target.shape), transposed=transposed)
        return self._place(name, packed.to(target.device))

    def _place(self, name: str, packed: PackedWeight) -> Tensor | None:
        """Keep a packed weight, arranged if the kernel multiplies it, else with its operand in the parameter."""
        layer, projection, transposed = self._experts[name]
        target = self._parameters[name]
        if self._kernel_weights is not None and name in self._multiplied:
            exact = put_arranged(self._kernel_weights, (layer, projection), packed)
            put_aside(self._aside, name, packed)
            _empty(target)
            return exact
        self._packed[name] = packed
        operand = packed.operand()
        values = target.detach().transpose(1, 2) if transposed else target.detach()
        values.copy_(operand.values)
        known = self._scales.get((layer, projection))
        if known is None or operand.scale is None:
            self._scales[layer, projection] = operand.scale
        else:
            known.copy_(operand.scale)
        return None

    def _check_names(self, state: Mapping[str, Tensor | PackedWeight]) -> None:
        missing = [name for name in self._parameters if name not in state]
        if missing:
            raise SyncError(
                f"{len(missing)} of {len(self._parameters)} parameters are missing from the sync, first {missing[0]!r}"
            )
        unknown = [name for name in state if name not in self._parameters and name not in self._others]
        if unknown:
            raise SyncError(
                f"the engine's model has no parameter {unknown[0]!r}{suggest(unknown[0], self._parameters)}"
            )

    def _checked(self, name: str, tensor: Tensor, target: Tensor) -> Tensor:
        if tensor.shape != target.shape:
            raise SyncError(f"{name!r} has shape {tuple(tensor.shape)}, the engine's has {tuple(target.shape)}")
        if tensor.dtype != target.dtype:
            raise SyncError(
                f"{name!r} is {tensor.dtype}, the engine computes in {target.dtype}; convert it first, as the "
                "trainer's own forward does, so that both sides quantize the same numbers"
            )
        return tensor.detach()

    def _check_tied(self, name: str, tensor: Tensor, target: Tensor) -> None:
        if not torch.equal(tensor.to(target.device), target.detach()):
            raise SyncError(
                f"{name!r} is tied to another parameter of the engine's model, but differs from it in the sync"
            )


def _empty(parameter: Tensor) -> None:
    """Free a parameter's memory: one NaN in the place of all its elements."""
    if parameter.untyped_storage().nbytes() > parameter.element_size():
        nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        parameter.data = nothing.expand(parameter.shape)


def _optional(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a state dict holds besides the parameters: second names of tied ones, and buffers."""
    names = dict(model.named_parameters(remove_duplicate=False))
    kept = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in kept}
    return {name: tensor for name, tensor in (names | buffers).items() if name not in parameters}


def _plain_kernel_weights(
    model: nn.Module, layout: ModelLayout, kernel_weights: KernelWeights, quantized: Collection[str]
) -> None:
    """The grouped kernel reads unquantized parameters where they lie."""
    layers = {path: layer for layer, path in layout.experts.items()}
    for name, weight, transposed in expert_weights(model, layout):
        path, _, projection = name.rpartition(".")
        if name in quantized:
            continue
        if usable(weight) and weight.dtype is torch.bfloat16 and not transposed:
            put_plain(kernel_weights, (layers[path], projection), weight.detach())
