"""Which part of FP4 experts costs a policy what, and what treating it before it is rounded would save or add.

    python benchmarks/expert_error.py smollm2-moe --texts 24 --device cpu

As ``kv_error.py``, for the inputs of both products of an expert and for its weights; K and V stay in bfloat16.

    rotated         sixteen neighbours times a Hadamard matrix before rounding, and back; weights along their inputs,
                    so that products stay what they are
    centred         inputs less their mean over all tokens, by layer and channel; added again after rounding. A bias of
                    each expert, its weights times the mean, would do the same
    four over six   the better of two scales for each block of weights, by squared error
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from kv_error import Means, Subject, Treatment, arguments, exact, hadamard, line, plain
from torch import Tensor

from tracefp4.core import Kind, Site
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.models.layout import ModelLayout
from tracefp4.models.sites import Operand
from tracefp4.quantizers.four_over_six import quantize_four_over_six
from tracefp4.quantizers.nearest import quantize_nearest
from tracefp4.training.sites import TrainerSites

Rounding = Callable[[Tensor, Numerics], Tensor]
"""Weights ``(E, N, D)`` bfloat16 as they are after rounding."""
BLOCK = 16


class Treated(TrainerSites):
    """Sites of a trainer whose expert inputs are treated before they are rounded."""

    def __init__(self, layout: ModelLayout, spec: Spec, treatments: Mapping[Kind, Treatment]) -> None:
        super().__init__(layout, spec)
        self.treatments = treatments

    def operand(self, site: Site, x: Tensor, numerics: Numerics, rows: Tensor | None) -> Operand:
        """As the trainer's, of treated vectors, dequantized."""

        def rounded(y: Tensor) -> Tensor:
            return quantize_nearest(y.view(x.shape).to(x.dtype), numerics).dequantize(torch.float32).view_as(y)

        treated = self.treatments[site.kind](site, x.unsqueeze(1).float(), rounded)
        return Operand(treated.view(x.shape).to(x.dtype), None)

    def gated(self, site: Site, x: Tensor, numerics: Numerics) -> Operand | None:
        """Never in one pass."""
        return None


def turned(x: Tensor, matrix: Tensor) -> Tensor:
    """Every :data:`BLOCK` neighbours times a matrix, float32."""
    return (x.float().unflatten(-1, (-1, BLOCK)) @ matrix).flatten(-2)


def rotated(site: Site, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Rounded in a rotated basis."""
    turn = hadamard(BLOCK).to(x.device)
    return turned(rounded(turned(x, turn)), turn.T)


def nearest(w: Tensor, numerics: Numerics) -> Tensor:
    """Rounded to nearest."""
    return torch.stack([quantize_nearest(one, numerics).dequantize(w.dtype) for one in w])


def nearest_rotated(w: Tensor, numerics: Numerics) -> Tensor:
    """Rounded in a rotated basis."""
    turn = hadamard(BLOCK).to(w.device)
    return turned(nearest(turned(w, turn).to(w.dtype), numerics), turn.T).to(w.dtype)


def four_over_six(w: Tensor, numerics: Numerics) -> Tensor:
    """Rounded under the better of two scales a block."""
    return quantize_four_over_six(w, numerics).dequantize(w.dtype)


def main() -> None:
    """Print a line a treatment."""
    parser = arguments(__doc__, "nvfp4-w4a4")
    chosen = parser.parse_args()
    spec = get_spec(chosen.spec)
    inputs, numerics = Spec("inputs", None, spec.activations, None), spec.weights
    if numerics is None:
        parser.error(f"spec {chosen.spec!r} leaves weights in bfloat16; take nvfp4-w4a4 or mxfp4-w4a4-kv4")
    subject = Subject(chosen.policy, chosen.texts, chosen.device)
    named = subject.model.named_parameters()
    weights = {n: p for n, p in named if n.endswith(("gate_up_proj", "down_proj")) and p.ndim == 3}
    own = {name: p.detach().clone() for name, p in weights.items()}

    def score(first: Treatment, second: Treatment) -> Tensor:
        return subject.score(Treated(subject.layout, inputs, {Kind.EXPERTS_IN: first, Kind.EXPERTS_MID: second}))

    def put(rounding: Rounding | None) -> None:
        for name, p in weights.items():
            p.data.copy_(own[name] if rounding is None else rounding(own[name], numerics))

    means = Means()
    floor = score(exact, exact)
    score(means.look, means.look)
    subject.introduce(floor)
    print(f"{'in':10} {'between':10} {'weights':15} {'more nats':>10} {'95 % interval':16} {'mean |d|':>9} {'k3':>8}")
    treatments: dict[str, Treatment] = {
        "exact": exact, "rounded": plain, "rotated": rotated, "centred": means.centred(plain)
    }  # fmt: skip
    roundings: dict[str, Rounding | None] = {
        "exact": None, "rounded": nearest, "rotated": nearest_rotated, "four over six": four_over_six
    }  # fmt: skip
    some = list(treatments)[1:]
    cases = [
        *((name, "exact", "exact") for name in some), *(("exact", name, "exact") for name in some),
        *((name, name, "exact") for name in some), *(("exact", "exact", name) for name in list(roundings)[1:]),
        *((name, name, "rotated" if name == "rotated" else "rounded") for name in some),
    ]  # fmt: skip
    last = "exact"
    for first, second, rounding in cases:
        if rounding != last:
            put(roundings[rounding])
            last = rounding
        delta = score(treatments[first], treatments[second]) - floor
        print(f"{first:10} {second:10} {rounding:15} {line(delta, subject.owner)}", flush=True)


if __name__ == "__main__":
    main()
