"""Rounding of another library beside which ours is measured: torchao, which nothing else needs.

torchao rounds in operations of PyTorch, to be compiled. It is timed as it is and, on a GPU, under ``torch.compile``;
the faster counts. Two things are timed, since what a trainer wants are values again and what a checkpoint wants are
codes::

    values   to codes and back to bfloat16, what its quantization-aware training does; our rows of ``round`` write such
    codes    packed codes and block scales alone, which are fewer bytes

NVFP4 has block scales without a global scale there, as its activations have by default.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tracefp4.evaluation.bench import Bench, Work, failures

Make = Callable[[Tensor], object]

BYTES = {"nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32, "mxfp8": 1 + 1 / 32}
"""A value takes as code and share of a scale."""


def bench_torchao(bench: Bench, xs: Sequence[Tensor]) -> None:
    """Rows of torchao for inputs ``xs``; a note if it is missing."""
    if importlib.util.find_spec("torchao") is None:
        bench.note("torchao was left out: it is not installed")
        return
    for kind, each in BYTES.items():
        for what, moved in (("values", 4.0), ("codes", 2 + each)):
            name = "round" if what == "values" else "round to codes"
            try:
                works = _works(kind, what)
                cases: list[tuple[str, list[Work]]] = [
                    (word, [lambda x=x, make=make: make(x) for x in xs]) for word, make in _ways(bench, works)
                ]
                bench.best(name, f"torchao {kind}", cases, moved * xs[0].numel())
            except (*failures(), ImportError, AttributeError, OSError) as error:  # other versions have other names
                bench.fail(name, f"torchao {kind}", error)


def _ways(bench: Bench, make: Make) -> list[tuple[str, Make]]:
    compiled = [("compiled", torch.compile(make, dynamic=False))] if bench.device.type == "cuda" else []
    return [*compiled, ("as it is", make)]


def _works(kind: str, what: str) -> Make:
    """A function of ``(rows, width)`` bfloat16."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize

    if kind == "nvfp4":
        if what == "codes":
            return nvfp4_quantize
        return lambda x: NVFP4Tensor.to_nvfp4(x).dequantize(torch.bfloat16)
    element = torch.float4_e2m1fn_x2 if kind == "mxfp4" else torch.float8_e4m3fn
    mode = ScaleCalculationMode.RCEIL
    if what == "codes":
        return lambda x: to_mx(x, element, 32, mode)
    return lambda x: MXTensor.to_mx(x, element, 32, mode).dequantize(torch.bfloat16)
