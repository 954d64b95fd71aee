"""Device functions: rounding to the grid of E2M1 or of E4M3 elements, to nearest and guided.

For ``a`` in [0, 6] the grid step is ``2^(e-1)`` with ``e = max(exponent of a, 0)``. Adding ``M = 2^(e+22)`` rounds
``a`` to a multiple of it, ties to even; the low bits of the sum count the steps, and the code is ``count + 2 e``: the
grid's even multiples are its codes with an even last bit, so this tie rule is the format's own. Seven comparisons
become one addition. E4M3 (``EIGHT``) has two bits more of a mantissa and six binades more below 1, up to 448: the step
is ``2^(e-3)`` with ``e = max(exponent of a, -6)``, ``M`` is ``2^(e+20)``, and the code is ``count + 8 (e + 6)``.

Guided rounding chooses between the two ends of the bracket of ``a``; the rules are those of
:mod:`tracefp4.quantizers.guided` and :mod:`tracefp4.quantizers.guided_e4m3`. The ends are ``a + M`` rounded down and
up, one instruction each on a GPU, and they are one where ``a`` is on the grid. One bit says which of them to take.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

_TWO_120 = tl.constexpr(2.0**120)
_TWO_126 = tl.constexpr(2.0**126)
_BELOW_6 = tl.constexpr(5.999999523162842)
"""The float32 below 6."""
_BELOW_448 = tl.constexpr(447.9999694824219)
"""The float32 below 448."""
SIGN = tl.constexpr(-(2**31))
"""The bit of a sign."""
LOG2E = tl.constexpr(1.4426950408889634)
"""Base 2 logarithm of e: exponentials are powers of two."""
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Kernels run in Triton's interpreter, which lacks inline assembly, cuts bfloat16 instead of rounding it, and gets its
subnormals wrong; :func:`narrow` and :func:`widen` then convert by integer arithmetic."""


@triton.jit
def _clipped(z, most, EIGHT: tl.constexpr):
    """``a = min(|z|, most)``, ``most`` of a NaN, and the bits of ``M`` (int32).

    Its exponent field is ``e + 149``, from 149; of E4M3 ``e + 147``, from 141.
    """
    higher: tl.constexpr = 20 if EIGHT else 22
    least: tl.constexpr = 141 if EIGHT else 149
    a = tl.minimum(tl.abs(z), most)  # one operation: magnitudes are free where floats are compared
    # Added before the maximum is taken: a GPU does both in one operation.
    return a, tl.maximum((a.to(tl.int32, bitcast=True) & 0x7F800000) + (higher << 23), least << 23)


@triton.jit
def _binade(magic, EIGHT: tl.constexpr):
    """Code (int32) at which the steps that ``M`` makes are counted from 0: ``2 e``, or ``8 (e + 6)`` of E4M3."""
    # Below its exponent field M is 0.
    if EIGHT:
        return (magic >> 20) - 1128
    else:
        return (magic >> 22) - 298


@triton.jit
def _sign(bits, z, EIGHT: tl.constexpr):
    """The sign of a code (int32) from ``bits``, those of ``z`` or 0. A NaN has none: its own is the device's."""
    if EIGHT:
        return tl.where(z == z, (bits >> 24) & 128, 0)
    else:
        return tl.where(z == z, (bits >> 28) & 8, 0)


@triton.jit
def nearest(z, signs, EIGHT: tl.constexpr, TIES: tl.constexpr, NEGATIVE_ZERO: tl.constexpr):
    """Nearest code (int32: E2M1 ``0..15``, E4M3 a byte) of ``z`` float32, and its value (float32).

    Beyond 6 or 448 it saturates, a NaN gives the code of +6 or byte 127 of E4M3. Whoever uses one of the two pays for
    one. ``signs`` int32: the bit of a sign, or 0 where the scale is 0 and everything becomes code 0. A NaN's value is 6
    or 448 with the sign of the NaN: what it is multiplied with is a NaN as well.
    """
    a, magic = _clipped(z, 448.0 if EIGHT else 6.0, EIGHT)
    total = a + magic.to(tl.float32, bitcast=True)
    count = total.to(tl.int32, bitcast=True) - magic
    level = total - magic.to(tl.float32, bitcast=True)
    if TIES != "even":
        step = (magic - (23 << 23)).to(tl.float32, bitcast=True)
        rest = a - level
        other = rest == (0.5 if TIES == "up" else -0.5) * step
        count = tl.where(other, count + (1 if TIES == "up" else -1), count)
        level = tl.where(other, a + rest, level)  # of a tie the other end is as far away
    code = count + _binade(magic, EIGHT)
    bits = z.to(tl.int32, bitcast=True)
    if NEGATIVE_ZERO == "strict":
        bits = tl.where(a > 0.0, bits, 0)
    elif NEGATIVE_ZERO == "positive":
        bits = tl.where(level > 0.0, bits, 0)
    if EIGHT:
        code = tl.where(z == z, code | (bits >> 24) & 128, 127)
    else:
        code |= _sign(bits, z, EIGHT)
    level = (level.to(tl.int32, bitcast=True) | (bits & signs)).to(tl.float32, bitcast=True)
    return tl.where(signs == 0, 0, code), level


@triton.jit
def guided(z, low, signs, EIGHT: tl.constexpr, BITS: tl.constexpr):
    """The end of ``z``'s bracket that the recorded bits name (decoder ``bracket``): int32 code, and float32 value.

    ``z`` float32 in units of the rollout's scale; ``low`` int32, the low ``BITS`` bits of each recorded code; ``signs``
    as in :func:`nearest`. From 6 on the bracket is that of 4 and 6, from 448 on that of 416 and 448.
    """
    if BITS == 1:
        a, magic = _clipped(z, _BELOW_448 if EIGHT else _BELOW_6, EIGHT)
        lower, upper = _ends(a, magic)
        bits = tl.where(((lower ^ low) & 1) != 0, upper, lower)
        level = bits.to(tl.float32, bitcast=True) - magic.to(tl.float32, bitcast=True)
        code = bits - magic + _binade(magic, EIGHT)
        code |= _sign(z.to(tl.int32, bitcast=True), z, EIGHT)
        sign = z.to(tl.int32, bitcast=True) & signs
        return tl.where(signs == 0, 0, code), (level.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        code = _several_bits_of_eight(z, low, BITS) if EIGHT else _several_bits(z, low, BITS)
        code = tl.where(signs == 0, 0, code)
        return code, magnitude(code, EIGHT)


@triton.jit
def _ends(a, magic):
    """Bits (int32) of ``a + M`` rounded down and up: those of ``M`` plus the steps to the ends of ``a``'s bracket."""
    m = magic.to(tl.float32, bitcast=True)
    if INTERPRETED:
        total = a + m
        rest, bits = a - (total - m), total.to(tl.int32, bitcast=True)
        return bits - (rest < 0.0).to(tl.int32), bits + (rest > 0.0).to(tl.int32)
    else:
        # Not by libdevice, whose additions take a subnormal ``a`` for 0.
        lower = tl.inline_asm_elementwise("add.rm.f32 $0, $1, $2;", "=r,r,r", [a, m], tl.float32, True, 1)
        upper = tl.inline_asm_elementwise("add.rp.f32 $0, $1, $2;", "=r,r,r", [a, m], tl.float32, True, 1)
        return lower.to(tl.int32, bitcast=True), upper.to(tl.int32, bitcast=True)


@triton.jit
def _bracket(z, EIGHT: tl.constexpr):
    """``a`` below 6 or 448, and the codes (int32) of its bracket's ends, which are one where ``a`` is on the grid."""
    a, magic = _clipped(z, _BELOW_448 if EIGHT else _BELOW_6, EIGHT)
    lower, upper = _ends(a, magic)
    first = _binade(magic, EIGHT) - magic
    return a, lower + first, upper + first


@triton.jit
def _several_bits(z, low, BITS: tl.constexpr):
    """The code of :func:`guided` for two bits and more."""
    z = tl.where(z == z, z, 6.0)
    a, lower, upper = _bracket(z, False)
    sign = (z.to(tl.int32, bitcast=True) >> 28) & 8
    if BITS == 2:
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
def _several_bits_of_eight(z, low, BITS: tl.constexpr):
    """The same of E4M3. If neither end is congruent, the nearest congruent magnitude (of two the smaller) names one."""
    a, lower, upper = _bracket(z, True)
    below = lower - ((lower - low) & ((1 << BITS) - 1))
    above = below + (1 << BITS)
    rise = magnitude(tl.minimum(above, 126), True) - a
    nearer = ((a - magnitude(tl.maximum(below, 0), True) <= rise) | (above > 126)) & (below >= 0)
    takes_upper = (above == upper) | ((below != lower) & (nearer == 0))
    return tl.where(takes_upper, upper, lower) | _sign(z.to(tl.int32, bitcast=True), z, True)


@triton.jit
def magnitude(code, EIGHT: tl.constexpr):
    """Signed value of codes (int32: E2M1 ``0..15``, finite bytes of E4M3), float32.

    Their bits are a float32 that is ``2^126``, or ``2^120``, too small.
    """
    if EIGHT:
        return (((code & 127) << 20) | ((code & 128) << 24)).to(tl.float32, bitcast=True) * _TWO_120
    else:
        return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * _TWO_126


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
def negated(x):
    """``-x``, of a zero as well, which the minus sign of Triton 3.6 is not: there it subtracts from 0."""
    return x * -1.0


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
