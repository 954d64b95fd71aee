"""Every choice in making FP4 numbers, named and hashed.

"NVFP4" fixes the bits: E2M1 codes, one E4M3 scale for 16 of them, an FP32 number above. It does not fix how a library
computes them, and libraries differ: multiply by a reciprocal or divide, a floor under block scales or none, ties to
even or up. Each difference changes some codes, so two sides that are both "NVFP4" already disagree before any noise. A
:class:`Numerics` names all the choices; :mod:`tracefp4.formats.blocks` is the one piece of code that carries them out;
the hash travels with every guidance frame and must be equal on both sides.

With ``a`` the largest magnitude under one global scale, ``m`` that of one block, ``E`` the largest element (6 or 448):

``encode scale``  ``g = 448 E / a``: what a value is multiplied by. TransformerEngine and compressed-tensors store it.
``decode scale``  ``d = a / (448 E)``: what a product is multiplied by. ModelOpt stores it.

One of the two is *primary* (``global_form``): computed from ``a``, stored and shipped. The other is always one IEEE
fp32 division of 1 by the primary. All steps are fp32, each rounded once, in the order written. ``a = 0`` gives 1.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from importlib import import_module
from typing import Literal, get_args, get_type_hints

from tracefp4.errors import FormatError, suggest

Element = Literal["e2m1", "e4m3"]
ScaleFormat = Literal["e4m3", "e8m0"]
Ties = Literal["even", "up", "down"]
NegativeZero = Literal["keep", "strict", "positive"]
ScaleRule = Literal["fold", "divide", "block-first", "block-first-rcp", "floor", "ceil", "half"]
Quotient = Literal["reciprocal", "divide", "divide-ratio"]
Scope = Literal["token", "tensor", "constant", "none"]
GlobalRule = Literal["amax", "amax-rcp", "pow2"]
GlobalForm = Literal["encode", "decode"]
NonFinite = Literal["inf-saturates-nan-marks-block"]
Epilogue = Literal["fp32-once"]


@dataclass(frozen=True)
class Numerics:
    """All arithmetic choices of one quantized tensor. Make variants with :func:`dataclasses.replace`."""

    name: str
    """Preset name; variants append what they change, such as ``nvfp4-te/weight``."""
    element: Element = "e2m1"
    """Format of the elements."""
    block: int = 16
    """Values that share a block scale: 16 or 32."""
    scale_format: ScaleFormat = "e4m3"
    """Format of block scales."""
    ties: Ties = "even"
    """Where a midpoint between two elements goes (E2M1; E4M3 elements always round ties to even)."""
    negative_zero: NegativeZero = "keep"
    """Sign of a zero code: sign of z; negative only for z < 0; never negative."""
    scale_rule: ScaleRule = "fold"
    """Block scale from ``m``. E4M3: ``fold`` m*(g*(1/6)); ``divide`` m/(6*d); ``block-first`` g*(m/6);
    ``block-first-rcp`` g*(m*(1/6)); each saturates at 448. E8M0: ``floor``, ``ceil``, ``half`` (see ``e8m0``)."""
    scale_floor: float = 0.0
    """Smallest block scale before it is rounded to its format; 0 for none. Not applied to blocks of zeros."""
    zero_scale: float = 0.0
    """Stored in place of a block scale that is zero, because all values are or because it underflowed. E8M0 has no
    zero: there it is what a block of zeros gets (``2**-127`` or more)."""
    quotient: Quotient = "reciprocal"
    """How z is made: ``reciprocal`` x * min(1/(s*(1/g)), FLT_MAX); ``divide`` x / (s*d);
    ``divide-ratio`` x / (s/g). In the first two the scale that is not primary is one division of 1 by the other."""
    scope: Scope = "token"
    """What shares a global scale: one row (last axis), one tensor, a constant, or nothing (MX formats)."""
    global_rule: GlobalRule = "amax"
    """``amax``: one division, (448 E) / a or a / (448 E) as ``global_form`` says. ``amax-rcp``: (1 / a) * (448 E).
    ``pow2``: g is the largest power of two with g * a <= 448 E, so no block scale exceeds 448."""
    global_form: GlobalForm = "encode"
    """Which of the two global scales is primary: computed, stored and shipped."""
    constant: float = 1.0
    """The *decode* scale under scope ``constant``."""
    nonfinite: NonFinite = "inf-saturates-nan-marks-block"
    """An infinity counts as the largest finite float and saturates; a NaN makes its block's scale byte NaN, so the
    block decodes to NaN and nothing else changes."""
    epilogue: Epilogue = "fp32-once"
    """Global scales multiply the FP32 product, which is rounded once to the output dtype."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            allowed = get_args(hints[item.name])
            value = getattr(self, item.name)
            if allowed and value not in allowed:
                raise FormatError(f"Numerics {self.name!r}: {item.name} is {value!r}{suggest(str(value), allowed)}.")
        if self.block not in (16, 32):
            raise FormatError(f"Numerics {self.name!r}: block is {self.block}, valid are 16 and 32.")
        if (self.scale_rule in ("floor", "ceil", "half")) != (self.scale_format == "e8m0"):
            raise FormatError(
                f"Numerics {self.name!r}: scale rule {self.scale_rule!r} cannot make {self.scale_format} scales."
            )
        if self.scale_format == "e8m0" and self.scope != "none":
            raise FormatError(f"Numerics {self.name!r}: E8M0 block scales have no global scale; set scope to 'none'.")
        if self.global_rule == "amax-rcp" and self.global_form == "decode":
            raise FormatError(f"Numerics {self.name!r}: global rule 'amax-rcp' makes an encode scale.")
        if not 0.0 < self.constant < math.inf:
            raise FormatError(f"Numerics {self.name!r}: constant is {self.constant}, it must be positive and finite.")
        for field in ("scale_floor", "zero_scale"):
            value = getattr(self, field)
            if not _is_scale(value, self.scale_format) and not (field == "scale_floor" and value == 0.0):
                raise FormatError(f"Numerics {self.name!r}: {field} {value} is no {self.scale_format} number.")

    @cached_property
    def hash(self) -> str:
        """Sixteen hex characters over all fields: equal hashes mean equal arithmetic."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def token_scale(self) -> bool:
        """Whether each row has a global scale of its own, which must travel with it."""
        return self.scope == "token"

    @property
    def element_max(self) -> float:
        """Largest element: 6 or 448."""
        return 6.0 if self.element == "e2m1" else 448.0


def _is_scale(value: float, scale_format: ScaleFormat) -> bool:
    """Whether a block scale format holds ``value`` exactly."""
    if scale_format == "e8m0":
        return math.frexp(value)[0] == 0.5 and 2.0**-127 <= value <= 2.0**127
    if value == 0.0:
        return True
    step = 2.0 ** max(math.frexp(value)[1] - 4, -9)
    return 0.0 < value <= 448.0 and (value / step).is_integer()


_PRESETS = {
    "nvfp4-te": "nvfp4",
    "nvfp4-pow2": "nvfp4",
    "nvfp4-modelopt": "nvfp4",
    "nvfp4-ct": "nvfp4",
    "nvfp4-flashinfer-exact": "nvfp4",
    "nvfp4-flashinfer-fast": "nvfp4",
    "sglang-kv-nvfp4": "nvfp4",
    "sglang-kv-mx": "mxfp4",
    "mxfp4-ocp": "mxfp4",
    "mxfp4-ceil": "mxfp4",
    "mxfp4-ct": "mxfp4",
    "mxfp8": "mxfp8",
}

NUMERICS = tuple(_PRESETS)
"""Names of all presets."""


def get_numerics(name: str) -> Numerics:
    """The preset ``name``.

    Raises:
        FormatError: no such preset; the message names the nearest one.
    """
    if name not in _PRESETS:
        raise FormatError(f"Unknown numerics {name!r}{suggest(name, NUMERICS)}.")
    return import_module(f"tracefp4.formats.{_PRESETS[name]}").PRESETS[name]
