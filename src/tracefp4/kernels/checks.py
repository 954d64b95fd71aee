"""Checks of scales and of recorded bits (:mod:`tracefp4.guidance.codec`) in one pass, and their comparison with others.

A program takes 16 tokens of a sequence: a chunk of scales, or as many checks of bits. It multiplies words of four bytes
with their keys modulo 2^64, adds, and keeps the upper half. Integers wrap, so the order of additions does not matter.
A comparison writes nothing but two counters: chunks with a token that counts, and those among them that differ. It is
over in a moment and waits for its launch most of all, so several sites of a kind share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.sizes import COMPARED_TOGETHER, cdiv, next_power_of_2

_TOKENS = tl.constexpr(16)
"""Tokens of a program, and of a chunk of scales."""
# Pointers of as many sites as one launch compares.
_SITES = ["x0_ptr", "x1_ptr", "x2_ptr", "x3_ptr", "x4_ptr", "x5_ptr", "x6_ptr", "x7_ptr"]
_EXPECTED = ["e0_ptr", "e1_ptr", "e2_ptr", "e3_ptr", "e4_ptr", "e5_ptr", "e6_ptr", "e7_ptr"]


@triton.jit
def _sums(
    data_ptr, keys_ptr, token, counts, first_row, size, words,
    WORDS: tl.constexpr, WHOLE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Words of the tokens ``token (16,)`` that count, each times its key, added up: int64 ``(16,)``."""
    lane = tl.arange(0, _TOKENS)
    start = (first_row + token) * size
    total = tl.zeros((_TOKENS,), tl.int64)
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        if WHOLE:
            at = data_ptr.to(tl.pointer_type(tl.int32)) + (start // 4)[:, None] + word[None, :]
            value = tl.load(at, mask=counts[:, None] & (word < words)[None, :], other=0).to(tl.int64) & 0xFFFFFFFF
        else:
            value = tl.zeros((_TOKENS, WORDS), tl.int64)
            for byte in tl.static_range(4):
                at = word * 4 + byte
                mask = counts[:, None] & (at < size)[None, :]
                value |= tl.load(data_ptr + start[:, None] + at[None, :], mask=mask, other=0).to(tl.int64) << (8 * byte)
        keys = keys_ptr + word[None, :] + (tl.zeros_like(lane) if EACH else lane)[:, None] * words
        total += tl.sum(value * tl.load(keys, mask=(word < words)[None, :], other=0), axis=1)
    return total


@triton.jit
def _check(
    data_ptr, valid_ptr, keys_ptr, out_ptr, rows, size, words, valid_stride,
    WORDS: tl.constexpr, WHOLE: tl.constexpr, EACH: tl.constexpr, VALID: tl.constexpr,
):  # fmt: skip
    sequence, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = chunk * _TOKENS + tl.arange(0, _TOKENS)
    counts = token < rows
    if VALID:
        counts = counts & (tl.load(valid_ptr + sequence * valid_stride + token, mask=counts, other=0) != 0)
    total = _sums(data_ptr, keys_ptr, token, counts, sequence * rows, size, words, WORDS, WHOLE, EACH)
    if EACH:
        tl.store(out_ptr + sequence * rows + token, (total >> 32).to(tl.int32), mask=token < rows)
    else:
        tl.store(out_ptr + sequence * chunks + chunk, (tl.sum(total, axis=0) >> 32).to(tl.int32))


@triton.jit(do_not_specialize_on_alignment=[*_SITES, *_EXPECTED])
def _count(
    x0_ptr, x1_ptr, x2_ptr, x3_ptr, x4_ptr, x5_ptr, x6_ptr, x7_ptr,
    e0_ptr, e1_ptr, e2_ptr, e3_ptr, e4_ptr, e5_ptr, e6_ptr, e7_ptr,
    valid_ptr, keys_ptr, totals_ptr, rows, size, words, WORDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    sequence, chunk, site = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    chunks = tl.num_programs(1)
    sites = (x0_ptr, x1_ptr, x2_ptr, x3_ptr, x4_ptr, x5_ptr, x6_ptr, x7_ptr)
    checks = (e0_ptr, e1_ptr, e2_ptr, e3_ptr, e4_ptr, e5_ptr, e6_ptr, e7_ptr)
    data_ptr, expected_ptr = sites[0], checks[0]
    for index in tl.static_range(1, 8):
        if site == index:
            data_ptr, expected_ptr = sites[index], checks[index]
    token = chunk * _TOKENS + tl.arange(0, _TOKENS)
    counts = tl.load(valid_ptr + sequence * rows + token, mask=token < rows, other=0) != 0
    total = _sums(data_ptr, keys_ptr, token, counts, sequence * rows, size, words, WORDS, WHOLE, False)
    found = (tl.sum(total, axis=0) >> 32).to(tl.int32)
    seen = tl.max(counts.to(tl.int64), axis=0)
    failed = (found != tl.load(expected_ptr + sequence * chunks + chunk)).to(tl.int64) & seen
    tl.atomic_add(totals_ptr, seen, sem="relaxed")
    tl.atomic_add(totals_ptr + 1, failed, sem="relaxed")


def _options(words: int, data: Sequence[Tensor]) -> dict[str, int | bool]:
    whole = all(part.shape[-1] % 4 == 0 and part.data_ptr() % 4 == 0 for part in data)
    return {"WORDS": min(64, next_power_of_2(words)), "WHOLE": whole, "num_warps": 4 if words > 16 else 1}


def checks(data: Tensor, valid: Tensor | None, keys: Tensor, *, each: bool) -> Tensor:
    """Checks of ``data``.

    Args:
        data: uint8 ``(B, T, n)``, contiguous.
        valid: bool ``(B, T)``, or ``(T,)`` for all alike, contiguous: tokens that count; ``None``: all do.
        keys: int64 ``(16, ceil(n / 4))``, contiguous.
        each: one of each token with the first row of the keys, else one of each 16 tokens.

    Returns:
        int32 ``(B, T)`` or ``(B, ceil(T / 16))``.
    """
    batch, rows, size = data.shape
    out = torch.empty(batch, rows if each else cdiv(rows, _TOKENS.value), dtype=torch.int32, device=data.device)
    if not data.numel():
        return out.zero_()
    _check[(batch, cdiv(rows, _TOKENS.value))](
        data, data if valid is None else valid, keys, out, rows, size, keys.shape[1],
        rows if valid is not None and valid.ndim > 1 else 0, EACH=each, VALID=valid is not None,
        **_options(keys.shape[1], [data]),
    )  # fmt: skip
    return out


def count(totals: Tensor, data: Sequence[Tensor], valid: Tensor, keys: Tensor, expected: Sequence[Tensor]) -> None:
    """Compare the checks of each 16 tokens with others.

    Args:
        totals: int64 ``(2,)``: chunks with a valid token, and those whose check is another, are added to it.
        data: of some sites, each uint8 ``(B, T, n)``, contiguous.
        valid: bool ``(B, T)``, contiguous: tokens that count.
        keys: as for :func:`checks`.
        expected: for each of ``data`` int32 ``(B, ceil(T / 16))``, contiguous.
    """
    for first in range(0, len(data), COMPARED_TOGETHER):
        some, theirs = (list(given[first : first + COMPARED_TOGETHER]) for given in (data, expected))
        batch, rows, size = some[0].shape
        if not some[0].numel():
            return
        rest = COMPARED_TOGETHER - len(some)
        _count[(batch, cdiv(rows, _TOKENS.value), len(some))](
            *some, *some[:1] * rest, *theirs, *theirs[:1] * rest, valid, keys, totals, rows, size, keys.shape[1],
            **_options(keys.shape[1], some),
        )  # fmt: skip
