"""``qat_w4a16``: quantization-aware training of the weights alone.

The rollout runs in the deployed format. The trainer quantizes the weights, which both sides can do identically, and
leaves activations and KV cache in bfloat16: rounding them once more, with its own values, would add a second error that
is not the rollout's. (For a deployment in W4A16 this is :mod:`~tracefp4.methods.qat` with ``spec = "nvfp4-w4a16"``.)
"""

from __future__ import annotations

from tracefp4.formats.spec import Spec
from tracefp4.methods.base import Method, weights_only


class QatW4A16(Method):
    """FP4 rollout as deployed; fake-quantized weights, bfloat16 activations and KV cache in the trainer."""

    name = "qat_w4a16"

    def trainer_spec(self, spec: Spec) -> Spec:
        """The weights of ``spec``."""
        return weights_only(spec)
