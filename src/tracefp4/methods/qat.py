"""``qat``: quantization-aware training. Both sides quantize with the same numerics, each by its own values.

The trainer sees quantization error, but not the *same* error: values that differ in the last bit of bfloat16 on the two
sides round to different codes, and each flip is a whole step of the FP4 grid.
"""

from __future__ import annotations

from tracefp4.methods.base import Method


class Qat(Method):
    """FP4 rollout, FP4 fake quantization with straight-through gradients in the trainer, no guidance."""

    name = "qat"
