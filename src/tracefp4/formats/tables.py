"""Small lookup tables over classes of floats.

Everything that happens to an FP4 value is decided by comparing it with a few thresholds: grid points 0, .5, ... 6,
midpoints 0.25, 0.75, ... 5, and a handful of others. Every one of them has at most four mantissa bits after the leading
one. Cut the float32 pattern of ``z`` after its fourth mantissa bit: no threshold lies strictly inside the piece, so
thirteen bits (sign, exponent, four mantissa bits) and one more that says whether anything non-zero was cut off decide
every comparison exactly. Those fourteen bits are the *class* of ``z``; a decision is one read from a table of 16384
entries that was computed once, in float64, from the plain definition. That is exact by construction, the same on every
device, and needs six cheap integer passes where seven comparisons need fourteen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

CLASSES = 1 << 14
"""Number of classes: 2 signs x 256 exponents x 16 mantissa prefixes x {exactly the prefix, a bit more}."""

_CUT = 19
"""Mantissa bits cut off: 23 - 4."""


def classify(z: Tensor) -> Tensor:
    """Class of each value.

    Args:
        z: float32, any shape.

    Returns:
        int32, same shape, in ``0..16383``. Even classes hold one value, odd classes the open interval above it (in
        magnitude) up to the next.
    """
    bits = z.view(torch.int32)
    above = bits.bitwise_and((1 << _CUT) - 1).clamp_(max=1)
    return above.add_(bits.bitwise_right_shift(_CUT).bitwise_and_(CLASSES // 2 - 1), alpha=2)


def representatives() -> np.ndarray:
    """One float64 value of each class, ``(16384,)``: the value itself, or the middle of the open interval."""
    prefix = np.arange(CLASSES // 2, dtype=np.uint32) << np.uint32(_CUT)
    with np.errstate(invalid="ignore"):  # signalling NaNs among the classes become quiet ones
        exact = prefix.view(np.float32).astype(np.float64)
        inside = (prefix | np.uint32(1 << (_CUT - 1))).view(np.float32).astype(np.float64)
    return np.stack([exact, inside], axis=1).reshape(-1)


def build(decide: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    """Tabulate a decision over all classes.

    Args:
        decide: maps ``(16384,)`` float64 representatives to ``(16384,)`` integers.

    Returns:
        ``(16384,)`` uint8.
    """
    return torch.from_numpy(decide(representatives()).astype(np.uint8))


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` for a flat table; ``index`` int32 of any shape, result in the dtype of ``table``."""
    return table.index_select(0, index.reshape(-1)).view(index.shape)


def on_device(make: Callable[..., Tensor], device: torch.device, *args: object) -> Tensor:
    """The table ``make(*args)`` as a tensor on ``device``, made once.

    The first use on a device computes on the host and copies, so warm up before capturing a CUDA graph or compiling.

    Args:
        make: a module-level function that returns the table.
        device: where the table will be read.
        args: hashable arguments of ``make``.
    """
    key = (make.__name__, str(device), *args)
    table = _made.get(key)
    return _make(make, device, args, key) if table is None else table


_made: dict[tuple[object, ...], Tensor] = {}


@torch.compiler.disable(reason="tables are made once, outside of graphs")
def _make(
    make: Callable[..., Tensor], device: torch.device, args: tuple[object, ...], key: tuple[object, ...]
) -> Tensor:
    with torch.inference_mode(False):  # a table made in inference mode could not be used in training
        return _made.setdefault(key, make(*args).to(device))
