"""Post-hoc quantization: FP4 weights for a policy that was trained without them.

The alternative to training in the deployed format. Every method stores the same format, NVFP4 expert weights; they
differ in how the block scales are chosen:

``nvfp4``                        the largest value of a block at 6: what the trainer and the engine do
``4over6-mse, -mae, -absmax``    at 6 or at 4, whichever has the smaller error (``quantizers/four_over_six.py``)
``hscale``                       the best of 16 neighbouring scales, weighted by the energy of the input channels on
                                 calibration data (``quantizers/h_scale.py``)

Activations and KV cache are not touched: an engine quantizes them as they come, in the spec's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.errors import ConfigError, suggest
from tracefp4.formats.blocks import Quantized, quantize_weight
from tracefp4.formats.numerics import Numerics
from tracefp4.models.layout import describe
from tracefp4.models.packing import PackedWeight, expert_weights
from tracefp4.quantizers.four_over_six import SELECTIONS, quantize_four_over_six
from tracefp4.quantizers.h_scale import quantize_h_scale

METHODS = ("nvfp4", *(f"4over6-{select}" for select in SELECTIONS), "hscale")
"""Names of all methods."""


@dataclass(frozen=True, slots=True)
class WeightError:
    """What quantization did to one stacked weight."""

    name: str
    error: float
    """``||W - Q(W)|| / ||W||``."""
    error_nearest: float
    """The same for method ``nvfp4``."""
    weighted: float | None
    """The first with each input channel weighted by its energy on calibration data, if there is any."""
    weighted_nearest: float | None
    unchanged: float
    """Share of block scales equal to those of ``nvfp4``."""
    larger: float
    smaller: float


def needs_calibration(method: str) -> bool:
    """Whether a method asks for input energies; raises :class:`ConfigError` for an unknown one."""
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}{suggest(method, METHODS)}")
    return method == "hscale"


def chooser(method: str, numerics: Numerics, energy: Mapping[str, Tensor] | None) -> Callable[[str, Tensor], Quantized]:
    """``(parameter name, weight (E, N, K)) -> codes and scales`` by a method.

    Raises:
        ConfigError: an unknown method, or ``hscale`` without energies.
    """
    if needs_calibration(method):
        if energy is None:
            raise ConfigError("method 'hscale' weighs errors by calibration data, and there is none")
        known = energy
        return lambda name, w: quantize_h_scale(w, numerics, known[name].to(w.device))
    if method == "nvfp4":
        return lambda name, w: quantize_weight(w, numerics)
    select = method.removeprefix("4over6-")
    return lambda name, w: quantize_four_over_six(w, numerics, select)


@torch.no_grad()
def quantize_experts(
    model: nn.Module, method: str, numerics: Numerics, energy: Mapping[str, Tensor] | None = None, first: int = 0
) -> tuple[dict[str, PackedWeight], list[WeightError]]:
    """Quantize every expert projection of a model.

    Args:
        model: left as it is.
        method: one of :data:`METHODS`.
        numerics: weight numerics of the deployed spec.
        energy: input energies by parameter name (:mod:`tracefp4.export.calibration`); ``hscale`` needs them, and errors
            are then weighted as well.
        first: first layer that is quantized.

    Returns:
        Packed weights by parameter name, on the CPU, and the errors of each.
    """
    choose, packed, rows = chooser(method, numerics, energy), {}, []
    for name, tensor, transposed in expert_weights(model, describe(model), first):
        matrix = tensor.detach().transpose(1, 2).contiguous() if transposed else tensor.detach()
        found, nearest = choose(name, matrix), quantize_weight(matrix, numerics)
        weight = None if energy is None else energy[name].to(matrix.device)
        rows.append(_errors(name, matrix.float(), found, nearest, weight))
        one = PackedWeight.of(found)
        scale = None if one.global_scale is None else one.global_scale.cpu()
        packed[name] = PackedWeight(one.codes.cpu(), one.scales.cpu(), scale, numerics)
    return packed, rows


def summary(rows: list[WeightError]) -> dict[str, Any]:
    """Root mean square errors over all weights, and mean shares of scales, for JSON."""

    def rms(values: list[float]) -> float:
        return (sum(v * v for v in values) / len(values)) ** 0.5

    out: dict[str, Any] = {name: rms([getattr(r, name) for r in rows]) for name in ("error", "error_nearest")}
    if rows and rows[0].weighted is not None:
        out |= {name: rms([getattr(r, name) for r in rows]) for name in ("weighted", "weighted_nearest")}
    for name in ("unchanged", "larger", "smaller"):
        out[f"scales_{name}"] = sum(getattr(r, name) for r in rows) / len(rows)
    return out


def _errors(name: str, w: Tensor, found: Quantized, nearest: Quantized, energy: Tensor | None) -> WeightError:
    ours, plain = (_relative(w, q.dequantize(), None) for q in (found, nearest))
    weighted = [None, None] if energy is None else [_relative(w, q.dequantize(), energy) for q in (found, nearest)]
    # A scale under another global scale is another number: compare what a code of 1 stands for.
    a, b = (_units(q) for q in (found, nearest))
    same = (a / b - 1).abs() < 1e-3
    shares = [float(x.float().mean()) for x in (same, (a > b) & ~same, (a < b) & ~same)]
    return WeightError(name, ours, plain, weighted[0], weighted[1], *shares)


def _relative(w: Tensor, values: Tensor, energy: Tensor | None) -> float:
    factor = 1.0 if energy is None else energy[:, None].sqrt()
    return float(((w - values) * factor).norm() / (w * factor).norm())


def _units(q: Quantized) -> Tensor:
    ones = Quantized(torch.full_like(q.codes, 2), q.scales, q.global_scale, q.numerics)
    return ones.dequantize()[..., :: q.numerics.block].clamp_min(1e-30)
