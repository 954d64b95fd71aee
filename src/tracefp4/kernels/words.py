"""Device functions: words of four FP4 codes to bfloat16 operands (:mod:`tracefp4.formats.words` has the layout).

A register holds two words, and everything is done to both at once: nine integer instructions widen eight codes, and one
packed multiplication applies the scale to two values. Half of the integer work are multiplications, because they run
beside the logical operations, which are what a GPU has too few of. Triton has no packed 16-bit integers, so this is
inline PTX; the interpreter, which has no inline PTX, computes the same bits in int32.

A tensor core wants pairs of neighbours along the contraction in a register. For ``K Q^T`` and for weights that is along
a vector: both words belong to one row and share its scales. For ``V^T P`` it is along the tokens: the words, not the
sixteen-bit values that they become, are transposed on their way into registers, and each has scales of its own
(``ACROSS``).

The result of NVFP4 is ``code x scale x 2^-7``, exact in bfloat16; whoever uses it multiplies by ``2^7`` in the end.
MXFP4 is widened by two multiplications, ``2^126`` and the scale, and is the value itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tracefp4.kernels.elements import INTERPRETED, narrow

NVFP4_SHIFT = 128.0
"""What a sum of NVFP4 operands has to be multiplied by."""

_REGISTERS = "{ .reg .b32 a, b, c, d, e, p, q, r, s; .reg .b64 f; .reg .b16 h0, h1, h2, h3;"
# Products of a Hopper warp group read registers while the program goes on. Triton 3.6 leaves some in flight when a loop
# begins anew, and the operands of the next step were written over what they still read (benchmarks/in_flight.py).
_SETTLED = "wgmma.wait_group.sync.aligned 0;"
_CODES = """
    and.b32 a, $4, 0x81C081C0;
    shl.b32 b, $4, 3;
    and.b32 b, b, 0x81C081C0;
    shl.b32 c, $4, 6;
    and.b32 c, c, 0x81C081C0;
    and.b32 d, $4, 0x6C006C00;
    mul.wide.u32 f, d, 0x21000004;
    mov.b64 {e, d}, f;
    and.b32 d, d, 0x01C001C0;
    lop3.b32 d, e, 0x80008000, d, 0xEA;
"""
# Factors of one row: groups 0 and 2 in one register, 1 and 3 in another; a byte x 16 + 0x7680 is a bfloat16.
_BYTES_ALONG = """
    and.b32 p, $5, 0x00FF00FF;
    and.b32 q, $5, 0xFF00FF00;
    mad.lo.u32 p, p, 16, 0x76807680;
    mad.hi.u32 q, q, 0x10000000, 0x76807680;
    mov.b32 {h0, h2}, p;
    mov.b32 {h1, h3}, q;
"""
_PAIRS_ALONG = """
    mov.b32 {h0, h2}, $5;
    mov.b32 {h1, h3}, $7;
"""
# A half named twice costs nothing: the multiplication picks it, where a permutation would be an instruction.
_HALVES = """
    mov.b32 p, {h0, h0};
    mov.b32 q, {h1, h1};
    mov.b32 r, {h2, h2};
    mov.b32 s, {h3, h3};
"""
# Factors of two rows, the first row's in the low halves.
_BYTES_ACROSS = """
    prmt.b32 q, $5, $6, 0x5410;
    prmt.b32 s, $5, $6, 0x7632;
    and.b32 p, q, 0x00FF00FF;
    and.b32 q, q, 0xFF00FF00;
    and.b32 r, s, 0x00FF00FF;
    and.b32 s, s, 0xFF00FF00;
    mad.lo.u32 p, p, 16, 0x76807680;
    mad.hi.u32 q, q, 0x10000000, 0x76807680;
    mad.lo.u32 r, r, 16, 0x76807680;
    mad.hi.u32 s, s, 0x10000000, 0x76807680;
"""
_PAIRS_ACROSS = """
    prmt.b32 p, $5, $6, 0x5410;
    prmt.b32 q, $7, $8, 0x5410;
    prmt.b32 r, $5, $6, 0x7632;
    prmt.b32 s, $7, $8, 0x7632;
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
}"""
_NVFP4 = _CODES + _BYTES_ALONG + _HALVES + _SCALE
_NVFP4_ALONG = tl.constexpr(_REGISTERS + _NVFP4)
_NVFP4_SETTLED = tl.constexpr(_REGISTERS + _SETTLED + _NVFP4)
_NVFP4_ACROSS = tl.constexpr(_REGISTERS + _CODES + _BYTES_ACROSS + _SCALE)
_MXFP4_ALONG = tl.constexpr(_REGISTERS + _CODES + _TO_TRUE + _PAIRS_ALONG + _HALVES + _SCALE)
_LIFTED = _CODES + "mov.b32 {h0, h2}, $5;\nmov.b32 {h1, h3}, $5;" + _HALVES + _SCALE
_LIFTED_ALONG = tl.constexpr(_REGISTERS + _LIFTED)
_LIFTED_SETTLED = tl.constexpr(_REGISTERS + _SETTLED + _LIFTED)
_MXFP4_ACROSS = tl.constexpr(_REGISTERS + _CODES + _TO_TRUE + _PAIRS_ACROSS + _SCALE)


@triton.jit
def _e8m0_pair(data):
    """Bfloat16 of E8M0 bytes at bits 0-7 and 16-23 of int32, one in each half; byte 0 is a subnormal, 255 a NaN."""
    # Bit 8 of the difference is set where the byte plus one is 0 or 1 (mod 256).
    odd = (0x01000100 - ((data + 0x00010001) & 0x00FE00FE)) & 0x01000100
    return (data << 7) | (odd >> 2)


@triton.jit
def chunk_scales(ptr, chunk, mask, MX: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr = False):
    """Scales of chunks of 64 values, as :func:`operands` takes them; shapes of all arguments go together.

    ``ptr``: first scale of a vector; ``chunk``: numbers of its chunks. They count integers of the size that is loaded,
    so that the compiler sees neighbours and reads all scales of a vector at once: a copy beside the program's work
    (``cp.async``) takes four bytes or more. ``PAIRED``: where a thread has one chunk, whose two bytes of a block of 32
    are too few, it reads those of two; ``ptr`` points to four bytes. Without a ``mask`` (``None``) all are read.

    Returns:
        Two int32 tensors. NVFP4: the four E5M3 bytes, twice. MXFP4: factors of groups 0 and 2, and of groups 1 and 3;
        with blocks of 32 a chunk has two bytes, each for two groups of sixteen, and the two are equal.
    """
    if BLOCK == 32:
        other: tl.constexpr = None if mask is None else 0
        if PAIRED:
            both = tl.load(ptr.to(tl.pointer_type(tl.int32)) + chunk // 2, mask=mask, other=other) >> (chunk % 2 * 16)
        else:
            both = tl.load(ptr.to(tl.pointer_type(tl.int16)) + chunk, mask=mask, other=other).to(tl.int32)
        both = both & 0xFFFF
        pair = _e8m0_pair((both & 0xFF) | ((both >> 8) << 16))
        return pair, pair
    else:
        four = tl.load(ptr.to(tl.pointer_type(tl.int32)) + chunk, mask=mask, other=None if mask is None else 0)
        if MX:
            return _e8m0_pair(four & 0x00FF00FF), _e8m0_pair((four >> 8) & 0x00FF00FF)
        else:
            return four, four


@triton.jit
def _interpreted(bits, even, odd, GROUP: tl.constexpr, MX: tl.constexpr):
    """Interpreter: a raw code (bfloat16 pattern in int32) times the scale of its group, rounded to bfloat16."""
    raw = (bits << 16).to(tl.float32, bitcast=True)
    if MX:
        raw = raw * (2.0**126)
        pair = even if GROUP % 2 == 0 else odd
        factor = (pair << 16) if GROUP < 2 else (pair & -65536)
    else:
        factor = ((((even >> (8 * GROUP)) & 0xFF) << 4) + 0x7680) << 16
    return narrow(raw * factor.to(tl.float32, bitcast=True), tl.bfloat16)


@triton.jit
def operands(word, even, odd, MX: tl.constexpr, ACROSS: tl.constexpr = False, SETTLE: tl.constexpr = False):
    """Four bfloat16 tiles in the shape of ``word`` (int16): its codes ``0..3``, each times its scale.

    ``even`` and ``odd`` (int32, same shape) come from :func:`chunk_scales`. Unless ``ACROSS``, words that are
    neighbours in a register must share their scales, as those of one row do. ``SETTLE``, of NVFP4 along a vector: wait
    for the products of a Hopper warp group first.
    """
    if INTERPRETED:
        w = word.to(tl.int32) & 0xFFFF
        last = ((w << 2) & 0x8000) | ((w >> 3) & 0x0180) | ((w >> 8) & 0x0040)
        return (
            _interpreted(w & 0x81C0, even, odd, 0, MX),
            _interpreted((w << 3) & 0x81C0, even, odd, 1, MX),
            _interpreted((w << 6) & 0x81C0, even, odd, 2, MX),
            _interpreted(last, even, odd, 3, MX),
        )
    elif MX:
        return tl.inline_asm_elementwise(
            _MXFP4_ACROSS if ACROSS else _MXFP4_ALONG,
            "=r,=r,=r,=r,r,r,r,r,r",
            [word, even, odd],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            _NVFP4_ACROSS if ACROSS else _NVFP4_SETTLED if SETTLE else _NVFP4_ALONG,
            "=r,=r,=r,=r,r,r,r",
            [word, even],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def weight_operands(
    word, scale_ptr, inside, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, PAIRED: tl.constexpr, MX: tl.constexpr,
    SETTLE: tl.constexpr,
):  # fmt: skip
    """The same of a chunk of an expert weight, ``word (COLUMNS, 16)``; scales from ``scale_ptr`` on, an integer a row.

    NVFP4: E5M3 bytes. MXFP4 (``MX``): bytes of :func:`tracefp4.formats.words.lift`, whose codes take one multiplication
    as those of NVFP4 do. ``WHOLE``: all pointers are valid, ``inside`` is not needed. ``PAIRED``: a thread has one row,
    whose two bytes of MXFP4 are too few for a copy beside the program's work (``cp.async``), so it reads those of two.
    ``SETTLE``: wait for the products of a Hopper warp group before registers are written that they might be reading.
    """
    column = tl.arange(0, COLUMNS)
    if MX:
        if PAIRED:
            two = tl.load(scale_ptr.to(tl.pointer_type(tl.int32)) + column // 2)
            both = two >> (column % 2 * 16)
        else:
            at = scale_ptr + column
            both = (tl.load(at) if WHOLE else tl.load(at, mask=inside, other=0)).to(tl.int32)
        pair = tl.broadcast_to(_lifted_pair(both)[:, None], (COLUMNS, 16))
        if INTERPRETED:
            low, high = pair << 16, pair & -65536
            w = word.to(tl.int32) & 0xFFFF
            last = ((w << 2) & 0x8000) | ((w >> 3) & 0x0180) | ((w >> 8) & 0x0040)
            return (
                _scaled(w & 0x81C0, low), _scaled((w << 3) & 0x81C0, low),
                _scaled((w << 6) & 0x81C0, high), _scaled(last, high),
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _LIFTED_SETTLED if SETTLE else _LIFTED_ALONG,
                "=r,=r,=r,=r,r,r,r",
                [word, pair],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
    else:
        at = scale_ptr + column
        four = tl.load(at) if WHOLE else tl.load(at, mask=inside, other=0)
        four = tl.broadcast_to(four[:, None], (COLUMNS, 16))
        return operands(word, four, four, False, False, SETTLE)


@triton.jit
def _scaled(bits, factor):
    """Interpreter: a raw code times a factor in the high half of int32, rounded to bfloat16."""
    return narrow((bits << 16).to(tl.float32, bitcast=True) * factor.to(tl.float32, bitcast=True), tl.bfloat16)


@triton.jit
def _lifted_pair(both):
    """Factor pair of the two bytes in the low half of int32; what lies in the high half does not matter."""
    if INTERPRETED:
        return ((both & 0xFF) << 7) | ((both & 0xFF00) << 15)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, $1, 0, 0x4140; shl.b32 $0, t, 7; }", "=r,r", [both],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def vector_operands(
    word_ptr, scale_ptr, mask, PLACE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, MX: tl.constexpr,
    BLOCK: tl.constexpr, PAIRED: tl.constexpr, ACROSS: tl.constexpr = False,
):  # fmt: skip
    """The ``PLACE``-th of the vectors whose words and scales begin at ``(ROWS,)``, as :func:`operands` makes them.

    Words are read whether there is something or not; where the ``mask (ROWS,)`` is false, scales are finite, so nothing
    is a NaN. ``None`` for all. ``ACROSS``: four tiles ``(D / 4, ROWS)`` instead of ``(ROWS, D / 4)``.
    """
    word, chunk = tl.arange(0, D // 4) + PLACE * (D // 4), tl.arange(0, D // 64) + PLACE * (D // 64)
    if ACROSS:
        inside = None if mask is None else mask[None, :]
        even, odd = chunk_scales(scale_ptr[None, :], chunk[:, None], inside, MX, BLOCK, PAIRED)
        even = tl.reshape(tl.broadcast_to(even[:, None, :], (D // 64, 16, ROWS)), (D // 4, ROWS))
        odd = tl.reshape(tl.broadcast_to(odd[:, None, :], (D // 64, 16, ROWS)), (D // 4, ROWS))
        return operands(tl.load(word_ptr[None, :] + word[:, None]), even, odd, MX, True)
    else:
        inside = None if mask is None else mask[:, None]
        even, odd = chunk_scales(scale_ptr[:, None], chunk[None, :], inside, MX, BLOCK, PAIRED)
        even = tl.reshape(tl.broadcast_to(even[:, :, None], (ROWS, D // 64, 16)), (ROWS, D // 4))
        odd = tl.reshape(tl.broadcast_to(odd[:, :, None], (ROWS, D // 64, 16)), (ROWS, D // 4))
        return operands(tl.load(word_ptr[:, None] + word[None, :]), even, odd, MX)


@triton.jit
def vectors(
    word_ptr, scale_ptr, mask, PLACE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, MX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The values of :func:`vector_operands` in order, bfloat16 ``(ROWS, D)``."""
    a, b, c, d = vector_operands(word_ptr, scale_ptr, mask, PLACE, ROWS, D, MX, BLOCK, True)
    both = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (ROWS, D // 64, 16, 2, 2))
    return tl.reshape(tl.permute(both, (0, 1, 4, 3, 2)), (ROWS, D))  # group of 16 = 2 outer + inner


@triton.jit
def from_code(code, group):
    """Bits of a word (int32) that hold ``code`` (int32) at position ``group`` (0..3)."""
    plain = ((code & 8) << 12) | ((code & 7) << 6)
    last = ((code & 8) << 10) | ((code & 6) << 9) | ((code & 1) << 14)
    return tl.where(group == 3, last, plain >> (3 * group))


@triton.jit
def recoded(data):
    """E5M3 byte (int32) of E4M3 scale bytes ``0..127`` (int32)."""
    # Normal: bias 7 becomes 9. Subnormal 1..7: the leading bit becomes the implied one.
    leading = tl.where(data >= 4, 2, tl.where(data >= 2, 1, 0))
    small = (leading << 3) + ((data << (3 - leading)) & 7)
    code = tl.where(data >= 8, data + 16, small)
    return tl.where(data == 0, 143, tl.where(data == 127, 145, code))
