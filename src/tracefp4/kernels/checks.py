"""Checks of scales and of recorded bits (:mod:`tracefp4.guidance.codec`) in one pass, and their comparison with others.

A program takes 16 tokens of a sequence: a chunk of scales, or as many checks of bits. It multiplies words of four bytes
with their keys modulo 2^64, adds, and keeps the upper half. Integers wrap, so the order of additions does not matter.
A comparison writes nothing but two counters: chunks with a token that counts, and those among them that differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.sizes import cdiv, next_power_of_2

_TOKENS = tl.constexpr(16)
"""Tokens of a program, and of a chunk of scales."""


@triton.jit
def _check(
    data_ptr, valid_ptr, keys_ptr, expected_ptr, out_ptr, rows, size, words, valid_stride,
    WORDS: tl.constexpr, WHOLE: tl.constexpr, EACH: tl.constexpr, VALID: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    sequence, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, _TOKENS)
    token = chunk * _TOKENS + lane
    counts = token < rows
    if VALID:
        counts = counts & (tl.load(valid_ptr + sequence * valid_stride + token, mask=counts, other=0) != 0)
    start = (sequence * rows + token) * size
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
    if EACH:
        tl.store(out_ptr + sequence * rows + token, (total >> 32).to(tl.int32), mask=token < rows)
    else:
        found = (tl.sum(total, axis=0) >> 32).to(tl.int32)
        if COUNT:
            seen = tl.max(counts.to(tl.int64), axis=0)
            failed = (found != tl.load(expected_ptr + sequence * chunks + chunk)).to(tl.int64) & seen
            tl.atomic_add(out_ptr, seen, sem="relaxed")
            tl.atomic_add(out_ptr + 1, failed, sem="relaxed")
        else:
            tl.store(out_ptr + sequence * chunks + chunk, found)


def _launch(
    data: Tensor, valid: Tensor | None, keys: Tensor, expected: Tensor | None, out: Tensor, *, each: bool
) -> None:
    batch, rows, size = data.shape
    words = keys.shape[1]
    if not data.numel():
        return
    _check[(batch, cdiv(rows, _TOKENS.value))](
        data, data if valid is None else valid, keys, out if expected is None else expected, out, rows, size, words,
        rows if valid is not None and valid.ndim > 1 else 0,
        WORDS=min(64, next_power_of_2(words)), WHOLE=size % 4 == 0 and data.data_ptr() % 4 == 0, EACH=each,
        VALID=valid is not None, COUNT=expected is not None, num_warps=4 if words > 16 else 1,
    )  # fmt: skip


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
    batch, rows, _ = data.shape
    out = torch.empty(batch, rows if each else cdiv(rows, _TOKENS.value), dtype=torch.int32, device=data.device)
    if not data.numel():
        return out.zero_()
    _launch(data, valid, keys, None, out, each=each)
    return out


def count(totals: Tensor, data: Tensor, valid: Tensor, keys: Tensor, expected: Tensor) -> None:
    """Compare the checks of each 16 tokens with others.

    Args:
        totals: int64 ``(2,)``: chunks with a valid token, and those whose check is another, are added to it.
        data: as for :func:`checks`.
        valid: as for :func:`checks`.
        keys: as for :func:`checks`.
        expected: int32 ``(B, ceil(T / 16))``, contiguous.
    """
    _launch(data, valid, keys, expected, totals, each=False)
