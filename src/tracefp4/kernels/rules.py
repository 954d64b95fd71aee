"""Arithmetic choices as a kernel takes them: compile-time constants.

``formats`` lies above this package and knows what a numerics means; here its choices are words and numbers that select
branches of a kernel while it is compiled. Every field says the same as the field of
:class:`tracefp4.formats.numerics.Numerics` with that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Rules:
    """The choices that make codes."""

    block: int
    """Values that share a block scale, 16 or 32."""
    eight: bool
    """Elements are E4M3, of eight bits, which takes ``e8m0`` and the ``ties`` and ``negative_zero`` of that format,
    ``even`` and ``keep``; else E2M1."""
    e8m0: bool
    """Block scales are E8M0; else E4M3."""
    ties: str
    negative_zero: str
    scale_rule: str
    scale_floor: float
    floor_byte: int
    """``scale_floor`` in the scale format."""
    zero_byte: int
    """``zero_scale`` in the scale format; the byte of a block whose scale is zero."""
    quotient: str
    scope: str
    """``token``, ``tensor``, ``constant`` or ``none``."""
    global_rule: str
    global_form: str
    constant: float
    """Decode scale under scope ``constant``."""

    def constants(self) -> Mapping[str, Any]:
        """Keyword arguments of a kernel launch, upper case."""
        return _constants(self)


@lru_cache(maxsize=64)
def _constants(rules: Rules) -> Mapping[str, Any]:
    """Spelled out once: a launch has no time for it."""
    return {name.upper(): value for name, value in asdict(rules).items()}
