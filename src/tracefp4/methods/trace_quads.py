"""``trace_quads``: guidance where an error is kept, compensation where it is made anew.

What a rollout rounds is of two kinds. Inputs of experts are made, used and forgotten: a second FP4 term of the larger
residuals brings them so near to bfloat16 that the trainer need not round them (:mod:`~tracefp4.methods.quads`). Keys
and values are kept and read by every later token, in a cache that has no room for a second term: there the trainer
follows the rollout's roundings (:mod:`~tracefp4.methods.trace`). Guidance of K and V alone is a tenth of the bytes.
"""

from __future__ import annotations

from dataclasses import replace

from tracefp4.core import KV_KINDS
from tracefp4.formats.spec import Spec
from tracefp4.methods.quads import Quads


class TraceQuads(Quads):
    """Compensated FP4 rollout that records its KV cache; trainer with FP4 weights and K and V rounded as recorded."""

    name = "trace_quads"
    guided = True
    kinds = KV_KINDS

    def trainer_spec(self, spec: Spec) -> Spec:
        """Weights and KV cache of ``spec``."""
        return spec if spec.activations is None else replace(spec, name=f"{spec.name}/w4a16-kv", activations=None)
