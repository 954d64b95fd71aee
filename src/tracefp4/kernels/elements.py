"""Device functions: rounding to the E2M1 grid, to nearest and guided.

For ``a`` in [0, 6] the grid step is ``2^(e-1)`` with ``e = max(exponent of a, 0)``. Adding ``M = 2^(e+22)`` rounds
``a`` to a multiple of it, ties to even; the low bits of the sum count the steps, and the code is ``count + 2 e``: the
grid's even multiples are its codes with an even last bit, so this tie rule is the format's own. Seven comparisons
become one addition.

Guided rounding needs the neighbour *below* ``a``, which is the truncated count, and whether ``a`` is on the grid. The
rules are those of :mod:`tracefp4.quantizers.guided`.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

_TWO_126 = tl.constexpr(2.0**126)
LOG2E = tl.constexpr(1.4426950408889634)
"""Base 2 logarithm of e: exponentials are powers of two."""
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Kernels run in Triton's interpreter, which lacks inline assembly, cuts bfloat16 instead of rounding it, and gets its
subnormals wrong; :func:`narrow` and :func:`widen` then convert by integer arithmetic."""


@triton.jit
def _clipped(z):
    """``min(|z|, 6)`` and its grid exponent plus 127, still in the exponent field (int32)."""
    a = tl.minimum((z.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True), 6.0)
    return a, tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)


@triton.jit
def nearest(z, TIES: tl.constexpr, NEGATIVE_ZERO: tl.constexpr):
    """Nearest E2M1 code (int32, ``0..15``) of ``z`` float32; beyond 6 it saturates, NaN gives +6."""
    a, field = _clipped(z)
    magic = field + (22 << 23)
    total = a + magic.to(tl.float32, bitcast=True)
    count = total.to(tl.int32, bitcast=True) - magic
    if TIES != "even":
        step = (field - (1 << 23)).to(tl.float32, bitcast=True)
        rest = a - (total - magic.to(tl.float32, bitcast=True))
        if TIES == "up":
            count += (rest == 0.5 * step).to(tl.int32)
        else:
            count -= (rest == -0.5 * step).to(tl.int32)
    code = count + ((field >> 22) - 254)  # bit 22 of the field is 0: twice the exponent
    sign = (z.to(tl.int32, bitcast=True) >> 28) & 8
    if NEGATIVE_ZERO == "strict":
        sign = tl.where(a > 0.0, sign, 0)
    elif NEGATIVE_ZERO == "positive":
        sign = tl.where(code > 0, sign, 0)
    return tl.where(z == z, code | sign, 7)


@triton.jit
def guided(z, low, BITS: tl.constexpr):
    """The end of ``z``'s bracket that the recorded bits name (decoder ``bracket``), int32 codes ``0..15``.

    ``z`` float32 in units of the rollout's scale; ``low`` int32, the low ``BITS`` bits of each recorded code.
    """
    z = tl.where(z == z, z, 6.0)
    a, field = _clipped(z)
    sign = (z.to(tl.int32, bitcast=True) >> 28) & 8
    scaled = a * ((255 << 23) - field).to(tl.float32, bitcast=True)  # in grid steps: 2^(1-e)
    count = scaled.to(tl.int32)
    lower = tl.minimum(count + ((field >> 22) - 254), 6)
    on_grid = (count.to(tl.float32) == scaled) & (a != 6.0)
    upper = lower + 1 - on_grid.to(tl.int32)
    if BITS == 1:
        code = tl.where((upper & 1) == low, upper, lower)
    elif BITS == 2:
        middle = tl.where(low == 0, 1.0, tl.where(low == 1, 1.75, tl.where(low == 2, 2.5, 3.75)))
        congruent = low + 4 * (a > middle).to(tl.int32)
        congruent = tl.minimum(tl.maximum(congruent, lower), upper)
        code = tl.where((upper & 3) == low, upper, tl.where((lower & 3) == low, lower, congruent))
    elif BITS == 3:
        code = tl.minimum(tl.maximum(low, lower), upper)
    else:
        # Seen from z's side of zero, a code of the other sign lies below every magnitude.
        wanted = tl.where((low & 8) == sign, low & 7, -1)
        code = tl.minimum(tl.maximum(wanted, lower), upper)
    return code | sign


@triton.jit
def magnitude(code):
    """Signed value of codes ``0..15`` (int32), float32: their bits are a float32 that is ``2^126`` too small."""
    small = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    return small * _TWO_126


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """``value`` float32 rounded to nearest even in a narrower float type."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value == value, rounded, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)


@triton.jit
def widen(value):
    """``value`` of any float type as float32, exactly."""
    if INTERPRETED and value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def product(a, b, acc):
    """``a b + acc``: 16-bit operands, float32 sums. The interpreter would multiply bit patterns of bfloat16."""
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def rounded_product(a, b):
    """``a b`` float32, rounded before it is added to anything: a compiler may not make one operation of both."""
    if INTERPRETED:
        return a * b
    else:
        return libdevice.mul_rn(a, b)


@triton.jit
def log1p(x):
    """``log(1 + x)`` for float32 ``x > -1``; the interpreter knows plain logarithms alone."""
    if INTERPRETED:
        whole = 1.0 + x
        rest = x - (whole - 1.0)
        return tl.where(whole == 1.0, x, tl.log(whole) + rest / whole)
    else:
        return libdevice.log1p(x)


@triton.jit
def exponential(x):
    """``exp(x)`` float32 as PyTorch's own kernels compute it; Triton's is an approximation."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)
