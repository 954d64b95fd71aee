"""Bit planes and scale checksums: the two encodings inside a frame.

**Planes.** Of each code the low ``bits`` bits are kept. They are stored plane by plane: first bit 0 of all values of a
vector, then bit 1, and so on. Value ``i`` of a plane is bit ``i % 8`` (least significant first) of byte ``i // 8``.
So a record with fewer bits is a prefix of one with more, and cutting a plan down copies nothing::

    codes   c0 c1 ... c(D-1)        bits = 2
    bytes   [bit 0 of c0..c7] [bit 0 of c8..c15] ... | [bit 1 of c0..c7] ...
            '------------- D / 8 bytes ------------'

Eight values are handled at once as one 64-bit word. Packing multiplies a word of eight 0/1 bytes by a constant that
moves bit ``8 i`` to bit ``56 + i``; all 64 partial products fall on different bits, so nothing carries. Unpacking
copies a byte into all eight bytes of a word and keeps one bit in each.

**Scales.** Whole scales (8 bits) are stored as they are. Congruent scales are their low 2 or 3 bits in planes of
``ceil(n / 8)`` bytes; the unused high bits of the last byte are zero, and a reader refuses anything else.

**Checks.** A congruent scale that was restored wrongly looks like any other. So the whole bytes are summed up::

    check(chunk) = ( sum over its tokens t and words j of  key[t mod 16, j] * word[t, j]  mod 2^64 )  >>  32

where a word is four scale bytes, little-endian (zeros fill the last one). This is the multilinear hash of Lemire and
Kaser, "Strongly universal string hashing is fast" (Computer Journal 57, 2014), without its additive key. A collision
needs two sums less than 2^32 apart. Their difference is ``key * d + rest`` with ``0 < |d| < 2^32``; over all values of
that key it takes every multiple of a power of two (at most 2^31) equally often, so at most a fraction 2^-31 of the keys
miss a given error. Integer sums do not depend on their order: every device gives the same number.

The check of codes, which some plans send in the place of bits, is the same sum over the planes of one token at one
site: a chunk of one token, whose words run through the planes of its vectors one after the other.

A chunk of scales is 16 tokens *of the sequence*, whatever batch it is computed in. 4 bytes for 16 tokens are a quarter
byte a token and site, against the 80 bytes that 3-bit scales save on a vector of 2048. A chunk is also what a miss
costs: smaller ones would lose fewer tokens to one wrong scale, larger ones would save next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.kernels.runtime import usable

CHUNK = 16
"""Tokens that share a check."""

CHECK_BYTES = 4
"""Bytes of a check."""

_ONES = 0x0101010101010101
_GATHER = 0x0102040810204080
_SPREAD = 0x8040201008040201 - (1 << 64)
_FILL = 0x7F7F7F7F7F7F7F7F


def pack_bits(low: Tensor, bits: int) -> Tensor:
    """Keep the low ``bits`` bits of each value, as bit planes.

    Args:
        low: uint8 ``(..., D)`` with ``D`` a multiple of 8. Higher bits are ignored, so whole codes may be given.
        bits: 1 to 4 for codes (up to 8 works).

    Returns:
        uint8 ``(..., bits * D / 8)``, on the device of ``low``.

    Raises:
        FormatError: wrong dtype, ``D`` or ``bits``.
    """
    if low.dtype != torch.uint8 or low.ndim == 0 or low.shape[-1] % 8:
        raise FormatError(
            f"bit planes take uint8 values (..., D) with D a multiple of 8, got {low.dtype} {tuple(low.shape)}"
        )
    _check_bits(bits)
    if usable(low):
        from tracefp4.kernels import planes as kernel

        return kernel.pack(low, bits)
    words = wider(low, torch.int64)
    planes = [(((words >> b) & _ONES) * _GATHER) >> 56 for b in range(bits)]
    return torch.cat(planes, dim=-1).to(torch.uint8)


def unpack_bits(planes: Tensor, bits: int, width: int) -> Tensor:
    """Inverse of :func:`pack_bits`.

    Args:
        planes: uint8 ``(..., bits * width / 8)``.
        bits: number of planes.
        width: values of a vector, ``D``.

    Returns:
        uint8 ``(..., width)``, values below ``2 ** bits``.

    Raises:
        FormatError: the sizes do not belong together.
    """
    _check_bits(bits)
    if planes.dtype != torch.uint8 or width % 8 or planes.ndim == 0 or planes.shape[-1] * 8 != bits * width:
        raise FormatError(
            f"{bits} planes of {width} values are uint8 (..., {bits * width / 8:g}), "
            f"got {planes.dtype} {tuple(planes.shape)}"
        )
    if usable(planes):
        from tracefp4.kernels import planes as kernel

        return kernel.unpack(planes, bits, width)
    words = planes.unflatten(-1, (bits, width // 8)).to(torch.int64)
    flags = ((((words * _ONES) & _SPREAD) + _FILL) >> 7) & _ONES
    out = flags[..., 0, :].contiguous()
    for b in range(1, bits):
        out |= flags[..., b, :] << b
    return out.view(torch.uint8) if out.numel() else planes.new_empty((*planes.shape[:-1], width))


def scale_bytes(blocks: int, bits: int) -> int:
    """Bytes that ``blocks`` block scales of one vector take in ``bits`` bits each (8, 3 or 2)."""
    return blocks if bits == 8 else bits * -(-blocks // 8)


def pack_scales(scales: Tensor, bits: int) -> Tensor:
    """Block scales as they travel: whole bytes (``bits=8``), or planes of their low 3 or 2 bits.

    Args:
        scales: uint8 ``(..., n)``, whole bytes or already reduced.
        bits: 8, 3 or 2.

    Returns:
        uint8 ``(..., scale_bytes(n, bits))``.
    """
    _check_scale_bits(bits)
    if bits == 8:
        return scales
    return pack_bits(torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 8)), bits)


def unpack_scales(packed: Tensor, bits: int, blocks: int) -> Tensor:
    """Inverse of :func:`pack_scales`: uint8 ``(..., blocks)``, whole bytes or their low bits."""
    _check_scale_bits(bits)
    if packed.dtype != torch.uint8 or packed.ndim == 0 or packed.shape[-1] != scale_bytes(blocks, bits):
        raise FormatError(
            f"{blocks} scales in {bits} bits are uint8 (..., {scale_bytes(blocks, bits)}), "
            f"got {packed.dtype} {tuple(packed.shape)}"
        )
    return packed if bits == 8 else unpack_bits(packed, bits, -(-blocks // 8) * 8)[..., :blocks]


def clean_padding(packed: Tensor, bits: int, blocks: int) -> bool:
    """Whether the unused bits of :func:`pack_scales` are zero, in every vector. Waits for the device."""
    if bits == 8 or blocks % 8 == 0:
        return True
    # On the host by NumPy, which starts no threads beside those that read frames side by side.
    data = packed.numpy() if packed.device.type == "cpu" else packed
    plane = data.shape[-1] // bits
    return not bool((data[..., plane - 1 :: plane] >> (blocks % 8)).any())


def chunks(rows: int) -> int:
    """Number of checks of ``rows`` tokens."""
    return -(-rows // CHUNK)


def scale_checks(scales: Tensor, valid: Tensor | None = None) -> Tensor:
    """One check for each 16 tokens of a sequence, over the whole scale bytes of a site.

    Args:
        scales: uint8 ``(..., T, n)``: all block scales of a token in one row, token 0 first in the sequence.
        valid: bool ``(..., T)``, or ``(T,)`` for all alike; tokens that are not valid count nothing. ``None``: all are.
            Right padding of a batch must be marked here, or it would count.

    Returns:
        int32 ``(..., ceil(T / 16))``: the 32 bits of each check.

    The keys for a new ``n`` are copied to the device on first use; do that before capturing a CUDA graph.
    """
    if scales.dtype != torch.uint8 or scales.ndim < 2:
        raise FormatError(f"scale checks take uint8 (..., T, n), got {scales.dtype} {tuple(scales.shape)}")
    return _checks(scales, valid, CHUNK)


def code_checks(planes: Tensor, valid: Tensor | None = None) -> Tensor:
    """One check for each token, over the recorded bits of all its vectors at a site.

    Args:
        planes: uint8 ``(..., T, n)``: the planes of all vectors of a token in one row (:func:`pack_bits`).
        valid: as for :func:`scale_checks`; the check of a token that is not valid is 0.

    Returns:
        int32 ``(..., T)``: the 32 bits of each check. Other bits pass with a probability of at most 2^-31.
    """
    if planes.dtype != torch.uint8 or planes.ndim < 2:
        raise FormatError(f"code checks take uint8 (..., T, n), got {planes.dtype} {tuple(planes.shape)}")
    return _checks(planes, valid, 1)


def count_failures(totals: Tensor, scales: Sequence[Tensor], valid: Tensor, checks: Sequence[Tensor]) -> None:
    """Compare scales with the checks of those that were recorded, without waiting for the device.

    Args:
        totals: int64 ``(2,)``, added to: chunks with a valid token, and those of them whose check is another one. A
            chunk without a valid token proves nothing.
        scales: of some sites alike, each uint8 ``(B, T, n)``, as for :func:`scale_checks`.
        valid: bool ``(B, T)``.
        checks: for each of ``scales`` int32 ``(B, ceil(T / 16))``.

    Raises:
        FormatError: shapes do not belong together.
    """
    shape = batch, rows, n = scales[0].shape
    for part, check in zip(scales, checks, strict=True):
        own, mask, found = tuple(part.shape), tuple(valid.shape), tuple(check.shape)
        if n == 0 or own != shape or mask != (batch, rows) or found != (batch, chunks(rows)):
            raise FormatError(f"checks {found} and a mask {mask} do not belong to scales {own}")
    if usable(scales[0]):
        from tracefp4.kernels import checks as kernel

        keys, own = _keys_on(-(-n // 4), scales[0].device), [part.contiguous() for part in scales]
        kernel.count(totals, own, valid.contiguous(), keys, [check.contiguous() for check in checks])
        return
    known = torch.nn.functional.pad(valid, (0, -rows % CHUNK)).view(batch, chunks(rows), CHUNK).any(-1)
    for part, check in zip(scales, checks, strict=True):
        totals += torch.stack((known.sum(), ((scale_checks(part, valid) != check) & known).sum()))


def _checks(data: Tensor, valid: Tensor | None, chunk: int) -> Tensor:
    rows, n = data.shape[-2:]
    if usable(data):
        from tracefp4.kernels import checks as kernel

        if valid is not None and valid.ndim > 1:
            valid = valid.expand(data.shape[:-1])
        batch, keys = math.prod(data.shape[:-2]), _keys_on(-(-n // 4), data.device)
        mask = None if valid is None else valid.reshape((batch, rows) if valid.ndim > 1 else rows).contiguous()
        found = kernel.checks(data.reshape(batch, rows, n).contiguous(), mask, keys, each=chunk == 1)
        return found.view(*data.shape[:-2], found.shape[-1])
    padded = torch.nn.functional.pad(data, (0, -n % 4, 0, -rows % chunk))
    words = wider(padded, torch.int32).to(torch.int64) & 0xFFFFFFFF
    if valid is not None:
        words = words * torch.nn.functional.pad(valid, (0, -rows % chunk))[..., None]
    keys = _keys_on(words.shape[-1], data.device)[:chunk]
    sums = (words.unflatten(-2, (-1, chunk)) * keys).sum(dim=(-2, -1))
    return (sums >> 32).to(torch.int32)


@lru_cache(maxsize=64)
def _keys_on(words: int, device: torch.device) -> Tensor:
    return check_keys(words).to(device)


def check_keys(words: int) -> Tensor:
    """Keys of the checks, int64 ``(16, words)``: SplitMix64 (Steele et al. 2014) of ``token * 2^32 + word + 1``."""
    index = (np.arange(CHUNK, dtype=np.uint64)[:, None] << np.uint64(32)) + np.arange(1, words + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = index * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return torch.from_numpy(z.view(np.int64))


def wider(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as wider integers along the last axis, without a copy where memory permits it.

    Args:
        data: uint8 ``(..., n)``, ``n`` a multiple of the size of ``dtype``.
        dtype: an integer type.

    Returns:
        ``(..., n / size of dtype)``, little-endian.
    """
    shape = (*data.shape[:-1], data.shape[-1] // dtype.itemsize)
    if data.numel() == 0:
        return data.new_empty(shape, dtype=dtype)
    # Flat, because an axis of size 1 may have any stride, and a wider dtype wants them all divisible.
    flat = data.contiguous().reshape(-1)
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype).view(shape)


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise FormatError(f"bit planes keep 1 to 8 bits, got {bits}")


def _check_scale_bits(bits: int) -> None:
    if bits not in (8, 3, 2):
        raise FormatError(f"scales travel in 8 bits (whole), 3 or 2 (congruent), got {bits}")
