"""Device functions: block scales and global scales, by integer arithmetic on float32 patterns.

Both scale formats are pieces of a float32, so encoding is an addition. To round ``v`` to a multiple of ``2^k``, add
``2^(k+23)``: the sum has just enough bits for the multiple, the hardware rounds to nearest even, and the low bits of
its pattern *are* the multiple. For E4M3 the multiple is counted in eighths of the leading power of two, and the byte is
``8 (exponent + 6) + count``, subnormals and carries included. No conversion instruction is involved, so a byte is the
same on every device and in the interpreter.

Divisions are ``div_rn``, IEEE; Triton's ``/`` is two units in the last place off. Kernels are launched with
``enable_fp_fusion=False``, or a product and a sum would be rounded once instead of twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tracefp4.kernels.elements import SIGN

FLT_MAX = tl.constexpr(3.4028234663852886e38)
_TWO_120 = tl.constexpr(2.0**120)
_SIXTH = tl.constexpr(0.1666666716337204)
"""The float32 nearest to 1/6."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(x):
    """Largest magnitude of each block of ``x (N, B)`` float32, as a bit pattern: NaN on top, as integers order it."""
    # One operation a value: magnitudes are free where floats are compared.
    return tl.reduce(tl.abs(x), 1, _larger).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def is_nan_bits(amax):
    """Whether the block holds a NaN."""
    return amax > 0x7F800000


@triton.jit
def finite(amax):
    """The pattern as a float32, infinity as the largest finite float; of a NaN block too."""
    return tl.minimum(amax, 0x7F7FFFFF).to(tl.float32, bitcast=True)


@triton.jit
def row_top(amax):
    """Largest finite magnitude of a row from its blocks' maxima, float32; a block with a NaN does not count."""
    return tl.max(tl.where(is_nan_bits(amax), 0.0, finite(amax)), axis=0)


@triton.jit
def e4m3_value(data):
    """Value of scale bytes ``0..127`` (int32): the fields fit into a float32 that is ``2^120`` too small."""
    value = (data << 20).to(tl.float32, bitcast=True) * _TWO_120
    return tl.where(data == 127, float("nan"), value)


@triton.jit
def e8m0_value(data):
    """Value of scale bytes ``0..255`` (int32); byte 0 is the subnormal ``2^-127``, byte 255 a NaN."""
    odd = ((data == 0) | (data == 255)).to(tl.int32)
    return ((data << 23) | (odd << 22)).to(tl.float32, bitcast=True)


@triton.jit
def scale_value(data, E8M0: tl.constexpr):
    """Value of scale bytes (int32) of either format, float32."""
    if E8M0:
        return e8m0_value(data)
    else:
        return e4m3_value(data)


@triton.jit
def e4m3_byte(v):
    """Nearest E4M3 byte of ``v >= 0``, ties to even, saturating at 448; int32."""
    v = tl.minimum(v, 448.0)
    exponent = tl.maximum((v.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    magic = (exponent + 147) << 23
    count = (v + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - magic
    return 8 * (exponent + 6) + count


@triton.jit
def e8m0_byte(m, SCALE_RULE: tl.constexpr, EIGHT: tl.constexpr):
    """E8M0 byte of a block with largest magnitude ``m``: ``floor``, ``ceil`` or ``half``. ``EIGHT``: E4M3 elements."""
    largest: tl.constexpr = 0x600000 if EIGHT else 0x400000  # mantissas of 448 and 6
    half: tl.constexpr = 0x780000 if EIGHT else 0x600000
    bits = m.to(tl.int32, bitcast=True)
    exponent, field = bits >> 23, bits & 0x7FFFFF
    if SCALE_RULE == "ceil":
        exponent += (field > largest).to(tl.int32)
    elif SCALE_RULE == "half":
        exponent += (field >= half).to(tl.int32)
    return tl.minimum(tl.maximum(exponent - (8 if EIGHT else 2), 0), 254)


@triton.jit
def global_from_amax(top, GLOBAL_RULE: tl.constexpr, GLOBAL_FORM: tl.constexpr):
    """Global scale (primary form) of a row with largest finite magnitude ``top``, float32; 1 for a row of zeros."""
    if GLOBAL_RULE == "pow2":
        bits = top.to(tl.int32, bitcast=True)
        # 2688 = 0.65625 x 2^12; magnitudes in [1/2, 1) x 2^exponent, as frexp counts.
        power = 138 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x280000).to(tl.int32)
        power = tl.minimum(tl.maximum(tl.where(bits == 0, 0, power), -126), 126)
        if GLOBAL_FORM == "decode":
            power = -power
        return ((power + 127) << 23).to(tl.float32, bitcast=True)
    else:
        if GLOBAL_FORM == "decode":
            scale = tl.div_rn(top, 2688.0)
        elif GLOBAL_RULE == "amax-rcp":
            scale = tl.div_rn(1.0, top) * 2688.0
        else:
            scale = tl.div_rn(2688.0, top)
        return tl.where((top == 0.0) | (scale == 0.0), 1.0, tl.minimum(scale, FLT_MAX))


@triton.jit
def global_forms(g, SCOPE: tl.constexpr, GLOBAL_FORM: tl.constexpr, CONSTANT: tl.constexpr):
    """``(encode scale, decode scale)``, float32; both 1 where the format has none."""
    if SCOPE == "none":
        return 1.0, 1.0
    elif SCOPE == "constant":
        decode = tl.full((), CONSTANT, tl.float32)
        return tl.div_rn(1.0, decode), decode
    else:
        inverse = tl.div_rn(1.0, g)
        if GLOBAL_FORM == "encode":
            return g, inverse
        else:
            return inverse, g


@triton.jit
def block_scale(
    amax,
    encode,
    decode,
    EIGHT: tl.constexpr,
    E8M0: tl.constexpr,
    SCALE_RULE: tl.constexpr,
    SCALE_FLOOR: tl.constexpr,
    FLOOR_BYTE: tl.constexpr,
    ZERO_BYTE: tl.constexpr,
):
    """Scale bytes (int32) of blocks with largest magnitudes ``amax`` (bit patterns) under a global scale."""
    m = finite(amax)
    if E8M0:
        data = e8m0_byte(m, SCALE_RULE, EIGHT)
        if SCALE_FLOOR != 0.0:
            data = tl.maximum(data, FLOOR_BYTE)
        data = tl.where(amax == 0, ZERO_BYTE, data)
        return tl.where(is_nan_bits(amax), 255, data)
    else:
        if SCALE_RULE == "fold":
            value = m * (encode * _SIXTH)
        elif SCALE_RULE == "divide":
            value = tl.div_rn(m, 6.0 * decode)
        elif SCALE_RULE == "block-first":
            value = tl.div_rn(m, 6.0) * encode
        else:
            value = m * _SIXTH * encode
        if SCALE_FLOOR != 0.0:
            value = tl.maximum(value, SCALE_FLOOR)
        data = e4m3_byte(value)
        if ZERO_BYTE != 0 or SCALE_FLOOR != 0.0:
            data = tl.where((amax == 0) | (data == 0), ZERO_BYTE, data)
        return tl.where(is_nan_bits(amax), 127, data)


@triton.jit
def block_unit(data, encode, decode, E8M0: tl.constexpr, QUOTIENT: tl.constexpr):
    """What a value is divided by, float32: block scale times global decode scale; infinity where the scale is zero."""
    s = scale_value(data, E8M0)
    unit = tl.div_rn(s, encode) if QUOTIENT == "divide-ratio" else s * decode
    if not E8M0:
        unit = tl.where(data == 0, float("inf"), unit)
    return unit


@triton.jit
def signs_under(data, E8M0: tl.constexpr):
    """The bit of a sign (int32) for scale bytes; 0 for those of a scale of 0, under which a value keeps none."""
    if E8M0:
        return tl.full(data.shape, SIGN, tl.int32)
    else:
        return tl.where(data == 0, 0, SIGN)


@triton.jit
def _inverse(unit):
    """``1 / unit``, but the largest finite float for what has no finite reciprocal."""
    return tl.minimum(tl.div_rn(1.0, unit), FLT_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def normalized(x, unit, E8M0: tl.constexpr, QUOTIENT: tl.constexpr):
    """``x (N, B)`` in units of ``unit (N,)``, float32, not yet clipped.

    A power of two has a reciprocal, and a product with it is the quotient.
    """
    if QUOTIENT == "reciprocal" or E8M0:
        return x * _inverse(unit)[:, None]
    else:
        return tl.div_rn(x, unit[:, None])


@triton.jit
def has_nan(z, amax, unit, KNOWN: tl.constexpr, E8M0: tl.constexpr, QUOTIENT: tl.constexpr):
    """Whether a block of ``z (N, B) = normalized(x, unit)`` has a NaN.

    ``amax`` as of :func:`block_amax` for ``x``; ``KNOWN``: it is computed anyway.
    """
    if KNOWN and (QUOTIENT == "reciprocal" or E8M0):
        # A product with something finite is a NaN if ``x`` is, with an infinity if it is 0, with a NaN always; in all
        # three cases that of the largest magnitude is one too.
        top = amax.to(tl.float32, bitcast=True) * _inverse(unit)
    else:
        top = tl.reduce(tl.abs(z), 1, _larger)  # 0 / 0 is none of those
    return top != top
