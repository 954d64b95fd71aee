"""Which part of FP4 experts costs a policy what, and what treating it before it is rounded would save or add.

    python benchmarks/expert_error.py smollm2-moe --texts 24 --device cpu

As ``kv_error.py``, for the inputs of both products of an expert and for its weights; K and V stay in bfloat16.

    rotated         sixteen neighbours times a Hadamard matrix before rounding, and back; weights along their inputs,
                    so that products stay what they are
    centred         inputs less their mean over all tokens, by layer and channel; added again after rounding. A bias of
                    each expert, its weights times the mean, would do the same
    four over six   the better of two scales for each block of weights, by squared error
    ordered         input channels of the first product by their mean magnitude, so that those of a block are alike; one
                    order for all layers, as a model whose hidden dimension is permuted would have it
    smoothed        input channels of the first product in units of powers of two, halfway between what makes their
                    magnitudes equal and what makes those of their weights equal; a norm before them could do it
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

Rounding = Callable[[str, Tensor, Numerics], Tensor]
"""Weights of a name, ``(E, N, D)`` bfloat16, as they are after rounding."""
FIRST = "gate_up_proj"
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


class Basis:
    """The inputs of first products with their channels in another order and in other units."""

    def __init__(self) -> None:
        self.sizes: dict[int, Tensor] = {}
        """Summed magnitudes of the channels, by layer."""
        self.order: dict[int, Tensor] = {}
        self.units: dict[int, Tensor] = {}

    def look(self, site: Site, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        """Add up magnitudes; nothing is rounded."""
        self.sizes[site.layer] = self.sizes.get(site.layer, 0) + x.abs().flatten(0, -2).sum(0)
        return x

    def ordered(self) -> Basis:
        """Largest channels first."""
        made, total = Basis(), sum((size / size.mean()).log() for size in self.sizes.values())
        made.order = {layer: torch.as_tensor(total).argsort(descending=True) for layer in self.sizes}
        return made

    def smoothed(self, weights: Mapping[str, Tensor]) -> Basis:
        """In units of powers of two."""
        made = Basis()
        for name, w in weights.items():
            if name.endswith(FIRST):
                size = self.sizes[layer_of(name)]
                share = (size / w.float().abs().amax((0, 1))).log2() / 2
                made.units[layer_of(name)] = (share - share.median()).round().exp2()
        return made

    def treat(self, site: Site, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        """Inputs in this basis, rounded and back."""
        return self._there_and_back(site.layer, x, rounded, lambda units: 1 / units)

    def rounding(self, name: str, w: Tensor, numerics: Numerics) -> Tensor:
        """Weights in this basis, rounded and back."""
        if not name.endswith(FIRST):
            return nearest(name, w, numerics)
        return self._there_and_back(
            layer_of(name), w.float(), lambda y: nearest(name, y.to(w.dtype), numerics).float(), lambda units: units
        ).to(w.dtype)

    def _there_and_back(
        self, layer: int, x: Tensor, rounded: Callable[[Tensor], Tensor], factor: Callable[[Tensor], Tensor]
    ) -> Tensor:
        size = x.shape[-1]
        order = self.order.get(layer, torch.arange(size)).to(x.device)
        units = factor(self.units.get(layer, torch.ones(size)).to(x.device))
        found = rounded((x * units)[..., order])
        return found[..., order.argsort()] / units


def layer_of(name: str) -> int:
    """The layer that a weight belongs to."""
    return int(name.split("layers.")[1].split(".")[0])


def nearest(name: str, w: Tensor, numerics: Numerics) -> Tensor:
    """Rounded to nearest."""
    return torch.stack([quantize_nearest(one, numerics).dequantize(w.dtype) for one in w])


def nearest_rotated(name: str, w: Tensor, numerics: Numerics) -> Tensor:
    """Rounded in a rotated basis."""
    turn = hadamard(BLOCK).to(w.device)
    return turned(nearest(name, turned(w, turn).to(w.dtype), numerics), turn.T).to(w.dtype)


def four_over_six(name: str, w: Tensor, numerics: Numerics) -> Tensor:
    """Rounded under the better of two scales a block."""
    return quantize_four_over_six(w, numerics).dequantize(w.dtype)


def main() -> None:
    """Print a line a treatment."""
    parser = arguments(__doc__, "nvfp4-w4a4")
    parser.add_argument("--only", default="", help="only rows with this treatment")
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
            p.data.copy_(own[name] if rounding is None else rounding(name, own[name], numerics))

    means, basis = Means(), Basis()
    floor = score(basis.look, exact)
    score(means.look, means.look)
    ordered, smoothed = basis.ordered(), basis.smoothed(own)
    subject.introduce(floor)
    print(f"{'in':10} {'between':10} {'weights':15} {'more nats':>10} {'95 % interval':16} {'mean |d|':>9} {'k3':>8}")
    treatments: dict[str, Treatment] = {
        "exact": exact,
        "rounded": plain,
        "rotated": rotated,
        "centred": means.centred(plain),
    }
    also: dict[str, Treatment] = {"ordered": ordered.treat, "smoothed": smoothed.treat}  # fmt: skip
    roundings: dict[str, Rounding | None] = {
        "exact": None, "rounded": nearest, "rotated": nearest_rotated, "four over six": four_over_six
    }  # fmt: skip
    some, weighed = list(treatments)[1:], list(roundings)[1:]
    treatments |= also
    roundings |= {"ordered": ordered.rounding, "smoothed": smoothed.rounding}
    cases = [
        *((name, "exact", "exact") for name in some), *(("exact", name, "exact") for name in some),
        *((name, name, "exact") for name in some), *(("exact", "exact", name) for name in weighed),
        *((name, name, "rotated" if name == "rotated" else "rounded") for name in some),
        *((name, "rounded", name) for name in also),
    ]  # fmt: skip
    last = "exact"
    for first, second, rounding in cases:
        if chosen.only not in ("", first, second, rounding):
            continue
        if rounding != last:
            put(roundings[rounding])
            last = rounding
        delta = score(treatments[first], treatments[second]) - floor
        print(f"{first:10} {second:10} {rounding:15} {line(delta, subject.owner)}", flush=True)


if __name__ == "__main__":
    main()
