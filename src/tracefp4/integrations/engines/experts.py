"""Routed experts of one layer in our W4A4 arithmetic, whatever engine holds their weights.

FP4 tensor cores exist from Blackwell on. Elsewhere the same numbers are computed by emulation: a product of FP4
operands, ``code x block scale`` in bfloat16, is exact up to the order of its accumulation, and that is what
:func:`tracefp4.models.experts.experts_forward` computes. The engine's own weights are only read: they are packed when
they have been loaded, exactly as the trainer packs them, so that one checksum proves both sides quantize the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracefp4.core import Kind, Site
from tracefp4.errors import EngineError
from tracefp4.formats.numerics import Numerics
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
        self._operands: dict[str, Operand] = {}

    def load(self, gate_up: Tensor, down: Tensor) -> None:
        """Take loaded weights: ``(E, 2 I, H)``, gate first, and ``(E, H, I)``. They are kept, not copied."""
        self.gate_up_proj, self.down_proj = gate_up.detach(), down.detach()
        self.num_experts = gate_up.shape[0]
        for name, weight in (("gate_up_proj", self.gate_up_proj), ("down_proj", self.down_proj)):
            if self.weights is None:
                self._operands[name] = Operand(weight, None)
                continue
            self.packed[name] = pack_weight(weight, self.weights)
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
