"""Device functions: words of four FP4 codes to bfloat16 operands (:mod:`tracefp4.formats.words` has the layout).

Eleven integer instructions widen eight codes, two words side by side in one register, and one packed multiplication
applies the scale to two values. Triton has no packed 16-bit integers, so this is inline PTX; the interpreter, which has
no inline PTX, computes the same bits in int32.

The result of NVFP4 is ``code x scale x 2^-7``, exact in bfloat16; whoever uses it multiplies by ``2^7`` in the end.
MXFP4 is widened by two multiplications, ``2^126`` and the scale, and is the value itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tracefp4.kernels.elements import INTERPRETED, narrow

NVFP4_SHIFT = 128.0
"""What a sum of NVFP4 operands has to be multiplied by."""

_SPREAD = """
    prmt.b32 p, $5, $5, 0x1010;
    prmt.b32 q, $7, $7, 0x1010;
    prmt.b32 r, $5, $5, 0x3232;
    prmt.b32 s, $7, $7, 0x3232;
    and.b32 a, $4, 0x81C081C0;
    shl.b32 b, $4, 3;
    and.b32 b, b, 0x81C081C0;
    shl.b32 c, $4, 6;
    and.b32 c, c, 0x81C081C0;
    shl.b32 d, $4, 1;
    and.b32 d, d, 0x80008000;
    shr.b32 e, $4, 5;
    lop3.b32 d, e, 0x01000100, d, 0xEA;
    shr.b32 e, $4, 4;
    lop3.b32 d, e, 0x00C000C0, d, 0xEA;
"""
_TO_TRUE = """
    mov.b32 e, 0x7E807E80;
    mul.rn.bf16x2 a, a, e;
    mul.rn.bf16x2 b, b, e;
    mul.rn.bf16x2 c, c, e;
    mul.rn.bf16x2 d, d, e;
"""
_SCALE = """
    mul.rn.bf16x2 $0, a, p;
    mul.rn.bf16x2 $1, b, q;
    mul.rn.bf16x2 $2, c, r;
    mul.rn.bf16x2 $3, d, s;
"""
_REGISTERS = "{ .reg .b32 a, b, c, d, e, p, q, r, s;"
_NVFP4_PTX = tl.constexpr(_REGISTERS + _SPREAD + _SCALE + "}")
_MXFP4_PTX = tl.constexpr(_REGISTERS + _SPREAD + _TO_TRUE + _SCALE + "}")


@triton.jit
def scale_pair(data, MX: tl.constexpr):
    """Bfloat16 factors of raw codes, in both halves of int32: of the scale bytes at bits 0-7 and 16-23 of ``data``.

    ``s 2^119`` from E5M3 bytes; ``s`` from E8M0 bytes if ``MX``, where byte 0 is a subnormal and 255 a NaN.
    """
    if MX:
        # Bit 8 of the difference is set where the byte plus one is 0 or 1 (mod 256).
        odd = (0x01000100 - ((data + 0x00010001) & 0x00FE00FE)) & 0x01000100
        return (data << 7) | (odd >> 2)
    else:
        return (data << 4) + 0x76807680


@triton.jit
def chunk_scales(ptr, mask, MX: tl.constexpr, BLOCK: tl.constexpr):
    """Scale factors of a chunk of 64 values, in the shape of the pointers ``ptr`` to its first byte.

    Returns:
        Two int32 tensors of factor pairs: of groups 0 and 2, and of groups 1 and 3. With blocks of 32 a chunk has two
        scale bytes, each for two groups of sixteen, and the pairs are equal.
    """
    if BLOCK == 32:
        both = tl.load(ptr.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int32) & 0xFFFF
        pair = scale_pair((both & 0xFF) | ((both >> 8) << 16), MX)
        return pair, pair
    else:
        four = tl.load(ptr.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
        return scale_pair(four & 0x00FF00FF, MX), scale_pair((four >> 8) & 0x00FF00FF, MX)


@triton.jit
def _product(bits, scale, MX: tl.constexpr):
    """Interpreter: bfloat16 pattern (int32) of a raw code times a scale (pattern in the high half of int32)."""
    raw = (bits << 16).to(tl.float32, bitcast=True)
    if MX:
        raw = raw * (2.0**126)
    return narrow(raw * (scale & -65536).to(tl.float32, bitcast=True), tl.bfloat16)


@triton.jit
def operands(word, even, odd, MX: tl.constexpr):
    """Four bfloat16 tiles in the shape of ``word`` (int16): its codes ``0..3``, each times its scale factor.

    ``even`` and ``odd`` (int32, same shape) are factor pairs of :func:`chunk_scales`.
    """
    if INTERPRETED:
        w = word.to(tl.int32) & 0xFFFF
        last = ((w << 1) & 0x8000) | ((w >> 5) & 0x0100) | ((w >> 4) & 0x00C0)
        return (
            _product(w & 0x81C0, even << 16, MX),
            _product((w << 3) & 0x81C0, odd << 16, MX),
            _product((w << 6) & 0x81C0, even, MX),
            _product(last, odd, MX),
        )
    else:
        return tl.inline_asm_elementwise(
            _MXFP4_PTX if MX else _NVFP4_PTX,
            "=r,=r,=r,=r,r,r,r,r,r",
            [word, even, odd],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def chunk_operands(word_ptr, scale_ptr, mask, ROWS: tl.constexpr, MX: tl.constexpr, BLOCK: tl.constexpr):
    """Four bfloat16 tiles ``(ROWS, 16)`` of the chunks at ``word_ptr (ROWS,)`` (int16) and ``scale_ptr (ROWS,)``."""
    word = tl.load(word_ptr[:, None] + tl.arange(0, 16)[None, :], mask=mask[:, None], other=0)
    even, odd = chunk_scales(scale_ptr, mask, MX, BLOCK)
    even = tl.broadcast_to(even[:, None], (ROWS, 16))
    return operands(word, even, tl.broadcast_to(odd[:, None], (ROWS, 16)), MX)


@triton.jit
def chunk(word_ptr, scale_ptr, mask, ROWS: tl.constexpr, MX: tl.constexpr, BLOCK: tl.constexpr):
    """The 64 values of the chunks in order, bfloat16 ``(ROWS, 64)``."""
    a, b, c, d = chunk_operands(word_ptr, scale_ptr, mask, ROWS, MX, BLOCK)
    both = tl.join(tl.join(a, b), tl.join(c, d))  # (ROWS, 16, inner, outer), group = 2 outer + inner
    return tl.reshape(tl.permute(both, (0, 3, 2, 1)), (ROWS, 64))


@triton.jit
def vectors(
    word_ptr, scale_ptr, mask, ROWS: tl.constexpr, D: tl.constexpr, MX: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Whole vectors of ``D`` = 64, 128 or 256 values in order, bfloat16 ``(ROWS, D)``."""
    if D == 64:
        return chunk(word_ptr, scale_ptr, mask, ROWS, MX, BLOCK)
    else:
        low = vectors(word_ptr, scale_ptr, mask, ROWS, D // 2, MX, BLOCK)
        high = vectors(word_ptr + D // 8, scale_ptr + D // (2 * BLOCK), mask, ROWS, D // 2, MX, BLOCK)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (ROWS, D))


@triton.jit
def from_code(code, group):
    """Bits of a word (int32) that hold ``code`` (int32) at position ``group`` (0..3)."""
    plain = ((code & 8) << 12) | ((code & 7) << 6)
    last = ((code & 8) << 11) | ((code & 4) << 11) | ((code & 3) << 10)
    return tl.where(group == 3, last, plain >> (3 * group))


@triton.jit
def recoded(data):
    """E5M3 byte (int32) of E4M3 scale bytes ``0..127`` (int32)."""
    # Normal: bias 7 becomes 9. Subnormal 1..7: the leading bit becomes the implied one.
    leading = tl.where(data >= 4, 2, tl.where(data >= 2, 1, 0))
    small = (leading << 3) + ((data << (3 - leading)) & 7)
    code = tl.where(data >= 8, data + 16, small)
    return tl.where(data == 0, 143, tl.where(data == 127, 145, code))
