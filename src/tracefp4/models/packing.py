"""Packed expert weights and their checksum: the proof that two sides quantize the same weights.

Weights need no guidance. Both sides quantize the bfloat16 weights that the forward pass uses with the same numerics, so
the packed bytes are equal, and one checksum over them shows it after every sync. The checksum covers every tensor of
the model: quantized ones as packed codes, block scales and global scales, all others as their raw bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn

from tracefp4.errors import FormatError, SyncError
from tracefp4.formats import e2m1
from tracefp4.formats.blocks import Quantized
from tracefp4.formats.fused import has_kernel, operand_by_kernel
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.packed import Packed, quantize_packed
from tracefp4.models.fingerprint import fingerprint
from tracefp4.models.layout import ModelLayout
from tracefp4.models.repeated import Repeated, addresses
from tracefp4.models.sites import Operand


@dataclass(slots=True)
class PackedWeight:
    """One expert projection of one layer: ``E`` matrices ``(out, in)``, contraction axis last."""

    codes: Tensor
    """``(E, out, in / 2)`` uint8, two codes a byte, low nibble first."""
    scales: Tensor
    """``(E, out, in / block)`` uint8 block scales."""
    global_scale: Tensor | None
    """``(E, 1, 1)`` float32 in the numerics' primary form."""
    numerics: Numerics

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, out, in)`` of the weight that this stands for."""
        experts, out, half = self.codes.shape
        return experts, out, 2 * half

    @classmethod
    def of(cls, q: Quantized) -> PackedWeight:
        """Pack what a quantizer of stacked weights ``(E, out, in)`` chose."""
        return cls(e2m1.pack(q.codes), q.scales, q.global_scale, q.numerics)

    def quantized(self) -> Quantized:
        """Codes one a byte."""
        return Quantized(e2m1.unpack(self.codes), self.scales, self.global_scale, self.numerics)

    def dequantize(self) -> Tensor:
        """Values ``(E, out, in)`` float32."""
        return self.quantized().dequantize()

    def operand(self) -> Operand:
        """The weight as a matrix multiplication takes it: exact bfloat16 values and one FP32 scale an expert."""
        packed = Packed(self.codes, self.scales, self.numerics)
        scale = Quantized(self.codes, self.scales, self.global_scale, self.numerics).decode_scale()
        return Operand(packed.operand(), None if scale is None else scale.reshape(-1), packed)

    def parts(self) -> Iterator[Tensor]:
        """The stored tensors in a fixed order."""
        yield self.codes
        yield self.scales
        if self.global_scale is not None:
            yield self.global_scale

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts())

    def copy(self, device: torch.device) -> PackedWeight:
        """The same in memory of its own on ``device``."""
        scale = None if self.global_scale is None else self.global_scale.to(device, copy=True)
        return PackedWeight(self.codes.to(device, copy=True), self.scales.to(device, copy=True), scale, self.numerics)

    def to(self, device: torch.device) -> PackedWeight:
        """The same on ``device``; parts that lie there already are shared."""
        scale = None if self.global_scale is None else self.global_scale.to(device)
        return PackedWeight(self.codes.to(device), self.scales.to(device), scale, self.numerics)

    def check(self, name: str) -> None:
        """Refuse parts that do not fit one another.

        Args:
            name: of the parameter, for the sentence.

        Raises:
            FormatError: naming the part, what it is and what it has to be.
        """
        if self.codes.ndim != 3:
            raise FormatError(f"'{name}.codes' has shape {tuple(self.codes.shape)}, it must be (experts, out, in / 2)")
        experts, out, width = self.shape
        wanted: dict[str, tuple[Tensor | None, tuple[int, ...] | None, torch.dtype]] = {
            "codes": (self.codes, (experts, out, width // 2), torch.uint8),
            "scales": (self.scales, (experts, out, width // self.numerics.block), torch.uint8),
            "global": (self.global_scale, (experts, 1, 1) if self.numerics.scope == "tensor" else None, torch.float32),
        }
        for part, (found, shape, dtype) in wanted.items():
            is_there = "nothing" if found is None else f"{str(found.dtype).removeprefix('torch.')} {tuple(found.shape)}"
            must_be = "nothing" if shape is None else f"{str(dtype).removeprefix('torch.')} {shape}"
            if is_there != must_be:
                raise FormatError(f"'{name}.{part}' is {is_there}, under {self.numerics.name} it must be {must_be}")


def pack_weight(weight: Tensor, numerics: Numerics, *, transposed: bool = False) -> PackedWeight:
    """Quantize one stacked expert weight.

    Args:
        weight: ``(E, out, in)`` bfloat16, or ``(E, in, out)`` when ``transposed`` (gpt-oss).
        numerics: the spec's weight numerics.
        transposed: whether the contraction axis is the middle one.

    Raises:
        FormatError: the weight is not three-dimensional, or as :func:`tracefp4.formats.packed.quantize_packed`.
    """
    if weight.ndim != 3:
        raise FormatError(f"pack_weight takes stacked weights (experts, out, in), got shape {tuple(weight.shape)}.")
    matrix = weight.transpose(1, 2).contiguous() if transposed else weight
    packed, global_scale = quantize_packed(matrix.detach(), numerics, per=1)
    return PackedWeight(packed.codes, packed.scales, global_scale, numerics)


def weight_operand(
    weight: Tensor, numerics: Numerics, *, transposed: bool = False, into: Tensor | None = None
) -> Operand:
    """The operand of ``pack_weight``, where nobody wants the codes: values and global scales, bit for bit the same.

    Args:
        weight: see :func:`pack_weight`.
        numerics: see there.
        transposed: see there.
        into: contiguous bfloat16 ``(E, out, in)`` for the values, which a kernel then writes there; without one they
            are new.

    Raises:
        FormatError: see there.
    """
    if weight.ndim != 3 or transposed or not weight.numel() or not has_kernel(weight, numerics):
        operand = pack_weight(weight, numerics, transposed=transposed).operand()
        return Operand(operand.values, operand.scale)
    values, global_scale = operand_by_kernel(weight.detach(), numerics, per=1, into=into)
    scale = Quantized(values, values, global_scale, numerics).decode_scale()
    return Operand(values, None if scale is None else scale.reshape(-1))


def check_packed(
    name: str, packed: PackedWeight, numerics: Numerics | None, shape: tuple[int, ...], *, transposed: bool = False
) -> None:
    """Refuse a packed weight that does not stand for a parameter of an engine's model.

    Args:
        name: of the parameter.
        packed: what came.
        numerics: of the engine's expert weights; ``None`` if it does not quantize this one.
        shape: of the parameter.
        transposed: whether its contraction axis is the middle one.

    Raises:
        SyncError: other numerics, or another shape.
        FormatError: parts that do not fit one another.
    """
    if numerics is None or packed.numerics.hash != numerics.hash:
        mine = "bf16" if numerics is None else numerics.name
        raise SyncError(
            f"{name!r} comes packed as {packed.numerics.name}, the engine deploys {mine}; build it with the "
            "spec that the weights were quantized for"
        )
    packed.check(name)
    experts, out, width = packed.shape
    found = (experts, width, out) if transposed else (experts, out, width)
    if found != tuple(shape):
        raise SyncError(f"{name!r} comes packed with shape {found}, the engine's has {tuple(shape)}")


def expert_weights(model: nn.Module, layout: ModelLayout, first: int = 0) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield ``(parameter name, tensor, transposed)`` of every stacked expert projection from layer ``first`` on."""
    for layer in layout.moe_layers:
        if layer < first:
            continue
        name = layout.experts[layer]
        module = model.get_submodule(name)
        for projection in ("gate_up_proj", "down_proj"):
            yield f"{name}.{projection}", getattr(module, projection), bool(getattr(module, "is_transposed", False))


def digest(parts: Mapping[str, Iterable[Tensor]]) -> str:
    """Checksum (xxh3-128, hex) over the names, dtypes, shapes and fingerprints of tensors, in name order.

    Tensors are read where they lie; only their fingerprints come to the host, all together.

    Args:
        parts: for each parameter name the tensors that stand for it: packed parts, or the plain tensor alone.
    """
    return Digest().of(lambda: parts)


class Digest:
    """:func:`digest` of tensors that mostly stay where they are, taken again and again."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._repeated = Repeated()

    def of(self, parts: Callable[[], Mapping[str, Iterable[Tensor]]], key: tuple[int, ...] | None = None) -> str:
        """The checksum of ``parts()``.

        Args:
            parts: makes them, of tensors at the addresses ``key``.
            key: ``None`` where they are new each time, or lie on several devices.
        """
        numbers = self._repeated.run(key, lambda: self._fingerprints(parts()))
        devices = {number.device for number in numbers}
        found = {device: torch.stack([n for n in numbers if n.device == device]).tolist() for device in devices}
        state = xxhash.xxh3_128()
        for name, number in zip(self._names, numbers, strict=True):
            state.update(f"{name} {found[number.device].pop(0)}\n".encode())
        return state.hexdigest()

    def _fingerprints(self, parts: Mapping[str, Iterable[Tensor]]) -> list[Tensor]:
        self._names, numbers = [], []
        for name in sorted(parts):
            for tensor in parts[name]:
                self._names.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}")
                numbers.append(fingerprint(tensor))
        return numbers


class PackedState(Mapping[str, "Tensor | PackedWeight"]):
    """Parameters by name, with stacked expert weights packed: what a packed sync sends.

    A weight is packed when it is first asked for, and kept: the engine and the checksum ask for the same ones.

    Args:
        model: whose parameters they are.
        layout: of the model.
        numerics: of expert weights.
        weights: the parameters by name, as for :func:`model_digest`.
        first: first layer whose experts are packed.
    """

    def __init__(
        self, model: nn.Module, layout: ModelLayout, numerics: Numerics, weights: Mapping[str, Tensor], first: int = 0
    ) -> None:
        self._numerics, self._weights = numerics, weights
        self._transposed = {name: transposed for name, _, transposed in expert_weights(model, layout, first)}
        self._packed: dict[str, PackedWeight] = {}

    def __getitem__(self, name: str) -> Tensor | PackedWeight:
        if name not in self._transposed:
            return self._weights[name]
        if name not in self._packed:
            self._packed[name] = pack_weight(self._weights[name], self._numerics, transposed=self._transposed[name])
        return self._packed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def model_digest(
    model: nn.Module,
    layout: ModelLayout,
    numerics: Numerics | None,
    weights: Mapping[str, Tensor | PackedWeight] | None = None,
    digest: Digest | None = None,
    first: int = 0,
) -> str:
    """Checksum of a model as it is deployed with ``numerics`` for its expert weights (``None``: unquantized).

    Each weight is asked for once, in name order, and let go before the next one.

    Args:
        model: whose parameters they are.
        layout: of the model.
        numerics: of expert weights.
        weights: the parameters by name, where the model's own are sharded or packed already.
        digest: what took it before.
        first: first layer whose experts are quantized.
    """
    known: Mapping[str, Tensor | PackedWeight] = dict(model.named_parameters()) if weights is None else weights
    experts = {name: transposed for name, _, transposed in expert_weights(model, layout, first)} if numerics else {}

    def parts(name: str) -> Iterator[Tensor]:
        weight = known[name]
        if isinstance(weight, PackedWeight):
            yield from weight.parts()
        elif numerics is None or name not in experts:
            yield weight
        else:
            yield from pack_weight(weight, numerics, transposed=experts[name]).parts()

    # Those of a sharded or packed model are made when they are asked for.
    stay = addresses(weight for weight in known.values() if isinstance(weight, Tensor)) if type(known) is dict else None
    return (digest or Digest()).of(lambda: {name: parts(name) for name in known}, stay)
