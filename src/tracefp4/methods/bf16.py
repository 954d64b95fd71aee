"""``bf16``: rollout and trainer in bfloat16. The reference that every FP4 method is compared with."""

from __future__ import annotations

from tracefp4.formats.spec import Spec
from tracefp4.methods.base import Method, unquantized


class Bf16(Method):
    """No quantization on either side; what mismatch remains is the floor of two bfloat16 paths."""

    name = "bf16"

    def rollout_spec(self, spec: Spec) -> Spec:
        """BF16, whatever is deployed."""
        return unquantized()

    def trainer_spec(self, spec: Spec) -> Spec:
        """BF16, whatever is deployed."""
        return unquantized()
