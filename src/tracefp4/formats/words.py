"""Words: FP4 numbers laid out for a GPU without FP4.

A tensor core of the Hopper generation multiplies bfloat16. Whoever stores FP4 there has to widen it in registers, and
at memory speed there are about four instructions a value to do so. Two layouts make it cheap.

**Codes.** The bits ``s eem`` of a code, put at bits 15 and 8-6 of a 16-bit word, *are* a bfloat16: sign, two low
exponent bits, top mantissa bit; its value is the code's times ``2^-126``, the subnormal 0.5 included. Four codes fit
into one word. Three land there after one shift and one mask. They leave bits 14, 13, 11 and 10 free, and the fourth
code lies in them so that one multiplication shifts all its fields: by ``2^29 + 2^24 + 4`` in 64 bits, whose upper half
has the exponent moved right by 3 and the mantissa by 8, its lower half the sign moved left by 2; nothing collides::

    bit     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    code     0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2
    field    s  m  s  s  e  e  s  e  e  m  e  e  m  e  e  m

Word ``i`` (0..15) of a chunk of 64 values holds the values ``i``, ``16 + i``, ``32 + i`` and ``48 + i``. So the code at
position ``j`` of sixteen neighbouring words is one whole NVFP4 block, in order: it can be multiplied as it is, and
its block scale is one number.

**Scales.** A code times ``2^-126`` wants its scale times ``2^119`` (the largest power for which 448 does not
overflow), and a factor ``2^7`` at the end. E4M3 needs two cases for that, normal and subnormal. With one exponent bit
more and bias 9 (E5M3), all its values are normal, and ``(c << 4) + 0x7680`` is the bfloat16 pattern of ``s 2^119``.
E8M0 scales stay as they are.

A code times ``2^-126`` and an E8M0 scale ``s`` make two multiplications, because ``2^126 s`` may overflow. The blocks
of one matrix are never so far apart. So their exponents are moved up together until the largest is ``2^127``
(:func:`lift`); then one multiplication is exact, and a power of two at the end brings the sum back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats import e4m3
from tracefp4.formats.tables import lookup, on_device

CHUNK = 64
"""Values of sixteen words."""

ZERO, NAN = 143, 145
"""Bytes of the scales zero (its codes are zero, any finite scale would do) and NaN."""


def to_words(codes: Tensor) -> Tensor:
    """Arrange codes.

    Args:
        codes: uint8 ``(..., D)``, ``D`` a multiple of 64.

    Returns:
        int16 ``(..., D / 4)``.

    Raises:
        FormatError: wrong dtype or ``D``.
    """
    if codes.dtype != torch.uint8 or codes.ndim == 0 or codes.shape[-1] % CHUNK:
        raise FormatError(
            f"words take uint8 codes (..., D) with D a multiple of {CHUNK}, got {codes.dtype} {tuple(codes.shape)}."
        )
    c = codes.unflatten(-1, (-1, 4, 16)).to(torch.int32)
    sign, size = (c & 8) << 12, (c & 7) << 6
    word = (sign | size)[..., 0, :] | ((sign | size)[..., 1, :] >> 3) | ((sign | size)[..., 2, :] >> 6)
    last = c[..., 3, :]
    word |= ((last & 8) << 10) | ((last & 6) << 9) | ((last & 1) << 14)
    return word.to(torch.int16).flatten(-2)


def from_words(words: Tensor) -> Tensor:
    """Inverse of :func:`to_words`: int16 ``(..., D / 4)`` to uint8 codes ``(..., D)``."""
    w = words.unflatten(-1, (-1, 16)).to(torch.int32)
    parts = [((w >> (12 - 3 * j)) & 8) | ((w >> (6 - 3 * j)) & 7) for j in range(3)]
    parts.append(((w >> 10) & 8) | ((w >> 9) & 6) | ((w >> 14) & 1))
    return torch.stack(parts, dim=-2).to(torch.uint8).flatten(-3)


def of_packed(packed: Tensor) -> Tensor:
    """Words of codes that are packed two a byte: ``to_words(e2m1.unpack(packed))`` in four passes.

    Bytes ``k``, ``8 + k``, ``16 + k`` and ``24 + k`` of a chunk hold all codes of words ``2 k`` and ``2 k + 1``. Each
    byte is looked up as its share of the two words; shares have no bit in common, so their sum is the words.

    Args:
        packed: uint8 ``(..., D / 2)``, ``D`` a multiple of 64.

    Returns:
        int16 ``(..., D / 4)``.

    Raises:
        FormatError: wrong dtype or ``D``.
    """
    if packed.dtype != torch.uint8 or packed.ndim == 0 or packed.shape[-1] % (CHUNK // 2):
        raise FormatError(
            f"words take packed uint8 codes (..., D / 2) with D a multiple of {CHUNK}, got {packed.dtype} "
            f"{tuple(packed.shape)}."
        )
    share = packed.unflatten(-1, (-1, 4, 8)).to(torch.int32).add_(on_device(group_offsets, packed.device))
    pairs = lookup(on_device(share_table, packed.device), share).sum(-2, dtype=torch.int32)
    return pairs.view(torch.int16).flatten(-2)


def to_packed(words: Tensor) -> Tensor:
    """Inverse of :func:`of_packed`: int16 ``(..., D / 4)`` to uint8 ``(..., D / 2)``, ``e2m1.pack(from_words(words))``.

    A word is looked up as its four codes, one in each byte of an int32; a shift joins those of two words.
    """
    index = words.unflatten(-1, (-1, 16)).to(torch.int32).bitwise_and_(0xFFFF)
    codes = lookup(on_device(code_table, words.device), index)
    pairs = codes[..., 1::2].bitwise_left_shift(4).bitwise_or_(codes[..., 0::2])
    return pairs.unsqueeze(-1).view(torch.uint8).transpose(-1, -2).flatten(-3)


def recode(scales: Tensor) -> Tensor:
    """E4M3 bytes ``0..127`` as E5M3 bytes, one to one, uint8."""
    return lookup(on_device(recode_table, scales.device), scales.to(torch.int32))


def restore(scales: Tensor) -> Tensor:
    """Inverse of :func:`recode`."""
    return lookup(on_device(restore_table, scales.device), scales.to(torch.int32))


_LIFTED_RANGE = 133
"""Octaves below the largest scale in which a lifted factor times a raw code is exact in bfloat16."""


def lift(scales: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E8M0 scales of stacked matrices as the grouped product reads them, each matrix by itself.

    Args:
        scales: uint8 ``(E, ...)``.
        used: bool, the same shape: the block has codes that are not zero.

    Returns:
        ``(bytes, factor, exact)``: uint8 of the same shape, the pattern of a block's factor being ``byte << 7``;
        float32 ``(E,)``, a power of two that multiplies the finished sum; bool ``(E,)``: no scale is a NaN and none
        that matters is more than 133 octaves below the largest, so that products are exact.
    """
    data, used = scales.flatten(1).to(torch.int32), used.flatten(1)
    top = torch.where(used, data, 0).amax(1, keepdim=True)
    exact = (top[:, 0] < 255) & ~(used & (data < top - _LIFTED_RANGE)).any(1)
    factor = torch.ldexp(torch.ones(len(top), device=scales.device), top[:, 0] - 128)
    return (data + (254 - top)).clamp_(1, 254).to(torch.uint8).view(scales.shape), factor, exact


def group_offsets() -> Tensor:
    """Where the shares of each of a word's four codes begin in :func:`share_table`, int32 ``(4, 1)``."""
    return torch.arange(4, dtype=torch.int32)[:, None] * 256


def share_table() -> Tensor:
    """Two words as an int32, with the codes of one packed byte as code ``j`` and zeros: index ``256 j + byte``."""
    byte = torch.arange(256, dtype=torch.uint8)
    chunks = torch.zeros(4, 256, 4, 16, dtype=torch.uint8)
    for j in range(4):
        chunks[j, :, j, 0], chunks[j, :, j, 1] = byte & 15, byte >> 4
    return to_words(chunks.flatten(-2))[..., :2].contiguous().view(torch.int32).flatten()


def code_table() -> Tensor:
    """The four codes of every word, code ``j`` in byte ``j`` of an int32; index: the word, unsigned. ``(65536,)``."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    codes = from_words(every).view(-1, 4, 16).transpose(1, 2)
    return codes.contiguous().view(torch.int32).flatten()


def recode_table() -> Tensor:
    """E5M3 byte of every E4M3 byte; bytes of negative scales, which do not exist, map to NaN. ``(256,)``."""
    mantissa, exponent = torch.frexp(e4m3.decode(torch.arange(127, dtype=torch.uint8)))
    table = torch.full((256,), NAN, dtype=torch.int64)
    table[:127] = (exponent.long() + 8) * 8 + (mantissa * 16).long() - 8
    table[0] = ZERO
    return table.to(torch.uint8)


def restore_table() -> Tensor:
    """E4M3 byte of every E5M3 byte; unused bytes map to NaN. ``(256,)``."""
    table = torch.full((256,), e4m3.NAN, dtype=torch.uint8)
    codes = recode_table()[:128].long()
    table[codes] = torch.arange(128, dtype=torch.uint8)
    return table
