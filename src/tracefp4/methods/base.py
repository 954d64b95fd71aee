"""What distinguishes one way of pairing a quantized rollout with its trainer from another.

A method answers three questions: what does the rollout quantize, what does the trainer quantize, and does the trainer
follow the rollout's rounding. Everything else (advantages, loss, correction, optimizer, data, seeds, route replay) is
the same in every arm of a comparison, so it is not here.
"""

from __future__ import annotations

from typing import ClassVar

from tracefp4.formats.spec import Spec, get_spec


class Method:
    """Base of all methods; the defaults are those of a method that quantizes both sides alike."""

    name: ClassVar[str]
    guided: ClassVar[bool] = False
    """The engine records quantization outcomes and every trainer forward over rollout tokens follows them."""

    def rollout_spec(self, spec: Spec) -> Spec:
        """What the engine quantizes, given the run's deployment ``spec``."""
        return spec

    def trainer_spec(self, spec: Spec) -> Spec:
        """What the trainer's forward fake-quantizes."""
        return spec


def unquantized() -> Spec:
    """The spec that quantizes nothing."""
    return get_spec("bf16")
