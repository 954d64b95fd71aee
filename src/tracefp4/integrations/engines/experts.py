"""Routed experts of one layer in our W4A4 arithmetic, whatever engine holds their weights.

FP4 tensor cores exist from Blackwell on. Elsewhere the same numbers are computed by emulation: a product of FP4
operands, ``code x block scale`` in bfloat16, is exact up to the order of its accumulation, and that is what
:func:`tracefp4.models.experts.experts_forward` computes. Weights arrive in one of two forms:

- in the model's dtype, through the engine's own loader. They are read there and packed, exactly as the trainer packs
  them;
- packed by the trainer. They go past the loader (:func:`place_packed`) and are served as they are. The engine's own
  parameter then holds NaN: whoever multiplies by it, or packs it again, finds out.

Either way one checksum over what is packed proves that both sides quantize the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tracefp4.core import Kind, Site
from tracefp4.errors import EngineError, SyncError
from tracefp4.formats.numerics import Numerics
from tracefp4.integrations.engines.weights import Names
from tracefp4.models.experts import experts_forward
from tracefp4.models.operands import widened
from tracefp4.models.packing import PackedWeight, pack_weight
from tracefp4.models.sites import Operand


class EmulatedExperts:
    """A stand-in for the experts module of one layer; see :class:`~tracefp4.models.sites.ExpertsSite`.

    Args:
        layer: decoder layer.
        weights: numerics of the weights; ``None`` leaves them as they are.
        quantize: quantizes and records an input: ``(site, x, pairs) -> operand``.
        activation: of the fused projection's output ``(P, 2 I)``, gate first: the engine's own, ``(P, I)``.
    """

    has_bias = False
    is_transposed = False
    training = False

    def __init__(
        self,
        layer: int,
        weights: Numerics | None,
        quantize: Callable[[Site, Tensor, Tensor | None], Operand],
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        self.layer, self.weights = layer, weights
        self._quantize, self._activation = quantize, activation
        self.tracefp4 = self
        self.packed: dict[str, PackedWeight] = {}
        """By projection, ``gate_up_proj`` and ``down_proj``; empty when weights are not quantized."""
        self._arrived: dict[str, PackedWeight] = {}
        """What came packed since the last :meth:`load`."""
        self._operands: dict[str, Operand] = {}

    def place(self, projection: str, packed: PackedWeight) -> None:
        """Take a projection that came packed; the next :meth:`load` serves a copy of it on the engine's device."""
        self._arrived[projection] = packed

    def load(self, gate_up: Tensor, down: Tensor) -> None:
        """Take loaded weights: ``(E, 2 I, H)``, gate first, and ``(E, H, I)``. They are kept, not copied.

        A projection that came packed is not read out of them, but overwritten with NaN.
        """
        self.gate_up_proj, self.down_proj = gate_up.detach(), down.detach()
        self.num_experts = gate_up.shape[0]
        for name, weight in (("gate_up_proj", self.gate_up_proj), ("down_proj", self.down_proj)):
            if self.weights is None:
                self._operands[name] = Operand(weight, None)
                continue
            arrived = self._arrived.pop(name, None)
            if arrived is None:
                self.packed[name] = pack_weight(weight, self.weights)
            else:
                # A copy: the parts are a view of the file that everything came in.
                self.packed[name] = arrived.copy(weight.device)
                weight.fill_(float("nan"))
            self._operands[name] = widened(self.packed[name].operand())

    @torch.no_grad()
    def __call__(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """``(T, H)`` of ``x (T, H)``, expert ids ``(T, K)`` and gate values ``(T, K)``."""
        if not self._operands:
            raise EngineError(f"layer {self.layer}: experts were called before their weights were loaded")
        return experts_forward(self, x, chosen.to(torch.int64), gates)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self._activation(gate_up)

    def gate_up(self, module: object) -> Operand:
        """Weight operand of the fused gate and up projections."""
        return self._operands["gate_up_proj"]

    def down(self, module: object) -> Operand:
        """Weight operand of the down projection."""
        return self._operands["down_proj"]

    def enter(self, x: Tensor) -> Operand:
        """Quantize the input of gate_up."""
        return self._quantize(Site(self.layer, Kind.EXPERTS_IN), x, None)

    def middle(self, h: Tensor, pairs: Tensor) -> Operand:
        """Quantize the input of down."""
        return self._quantize(Site(self.layer, Kind.EXPERTS_MID), h, pairs)


def place_packed(
    names: Names, state: Mapping[str, Tensor | PackedWeight], experts: Mapping[int, EmulatedExperts | None], engine: str
) -> int:
    """Hand the weights that came packed to the experts that multiply them.

    Args:
        names: of the model.
        state: what came; see :meth:`Names.check`.
        experts: by layer; absent or ``None`` where the engine's own kernels compute them.
        engine: its name, for the sentence.

    Returns:
        How many there were.

    Raises:
        SyncError: an engine's own kernels keep the experts.
    """
    packed = {name: weight for name, weight in state.items() if isinstance(weight, PackedWeight)}
    for name, weight in packed.items():
        layer, projection = names.experts[name]
        ours = experts.get(layer)
        if ours is None:
            raise SyncError(
                f"{name!r} comes packed, but {engine}'s own kernels keep the experts of layer {layer} and take none "
                "after its start; write a checkpoint with `tracefp4 quantize --layout compressed-tensors` and start it "
                "with that"
            )
        ours.place(projection, weight)
    return len(packed)
