"""What a deployment keeps in memory of a model's experts and of its KV cache.

Of 16 bits a value, FP4 takes 4 and a share of its block's scale: 4.5 in NVFP4. So a layer that a spec leaves in
bfloat16 (``nvfp4-w4a4-kv4/b2``) costs 3.56 times as much, of each token's K and V and of its experts. That is the other
side of the guidance which such a layer does not need.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import Spec
from tracefp4.models.layout import ModelLayout


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes, without global scales and without what is never quantized."""

    experts: float
    """Of the routed experts' weights."""
    token: float
    """Of a token in the KV cache."""

    def beside(self, other: Footprint) -> str:
        """In words, compared with another deployment of the same model."""
        return (
            f"K and V {self.token:,.0f} B a token (x {self.token / max(other.token, 1):.2f}), "
            f"experts {self.experts / 1e6:,.1f} MB (x {self.experts / max(other.experts, 1):.2f})"
        )


def footprint(layout: ModelLayout, spec: Spec) -> Footprint:
    """What ``spec`` keeps of a model of this layout."""
    cached = sum(vectors * width for vectors, width in layout.kv_sizes().values())
    held = 3 * layout.num_experts * layout.hidden * layout.intermediate
    return Footprint(
        experts=sum(held * _bytes(spec.weights_of(layer)) for layer in layout.moe_layers),
        token=sum(cached * _bytes(spec.kv if spec.quantizes(layer) else None) for layer in layout.kv_layers),
    )


def _bytes(numerics: Numerics | None) -> float:
    """Of a value and its share of a block's scale."""
    if numerics is None:
        return 2.0
    return (0.5 if numerics.element == "e2m1" else 1.0) + 1 / numerics.block
