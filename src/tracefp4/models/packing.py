"""Packed expert weights and their checksum: the proof that two sides quantize the same weights.

Weights need no guidance. Both sides quantize the bfloat16 weights that the forward pass uses with the same numerics, so
the packed bytes are equal, and one checksum over them shows it after every sync. The checksum covers every tensor of
the model: quantized ones as packed codes, block scales and global scales, all others as their raw bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn

from tracefp4.errors import FormatError
from tracefp4.formats import e2m1
from tracefp4.formats.blocks import Quantized
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.packed import Packed, quantize_packed
from tracefp4.models.fingerprint import fingerprint
from tracefp4.models.layout import ModelLayout
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


def expert_weights(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield ``(parameter name, tensor, transposed)`` of every stacked expert projection."""
    for layer in layout.moe_layers:
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
    names, numbers = [], []
    for name in sorted(parts):
        for tensor in parts[name]:
            names.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}")
            numbers.append(fingerprint(tensor))
    devices = {number.device for number in numbers}
    found = {device: torch.stack([n for n in numbers if n.device == device]).tolist() for device in devices}
    state = xxhash.xxh3_128()
    for name, number in zip(names, numbers, strict=True):
        state.update(f"{name} {found[number.device].pop(0)}\n".encode())
    return state.hexdigest()


def model_digest(
    model: nn.Module, layout: ModelLayout, numerics: Numerics | None, weights: Mapping[str, Tensor] | None = None
) -> str:
    """Checksum of a model as it is deployed with ``numerics`` for its expert weights (``None``: unquantized).

    Each weight is asked for once, in name order, and let go before the next one.

    Args:
        model: whose parameters they are.
        layout: of the model.
        numerics: of expert weights.
        weights: the parameters by name, where the model's own are sharded.
    """
    known: Mapping[str, Tensor] = dict(model.named_parameters()) if weights is None else weights
    experts = {name: transposed for name, _, transposed in expert_weights(model, layout)} if numerics else {}

    def parts(name: str) -> Iterator[Tensor]:
        if numerics is None or name not in experts:
            yield known[name]
        else:
            yield from pack_weight(known[name], numerics, transposed=experts[name]).parts()

    return digest({name: parts(name) for name in known})
