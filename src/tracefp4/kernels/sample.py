"""Sampling in one pass over the logits.

The plain code (:mod:`tracefp4.rollout.sampler`) makes some twenty passes over integers and floats as large as the
logits, of a small model as many bytes as all its layers. Here a program draws the noise of its part of the vocabulary
in registers, keeps the best token and the running maximum and sum of the softmax, and writes five numbers; a second
kernel puts the parts together.

Two logarithms with all their bits would be most of the work, and few tokens need them. The noise of token ``i`` is
``-log(-log(1 - u))``, at most ``-log u``, and the bits of a float are nearly its logarithm: with ``u`` at least
``2^e (1 + m)``, ``m`` in [0, 1), ``-log2 u`` is at most ``-(e + m)``. So a block of tokens first finds this bound, in a
few instructions from the upper half of the random bits, and draws its noise only if a token may beat the best so far.
That is the first block, about every second of the next ones, and ever fewer.

Noise and sums of logit and noise are the same float32 numbers as in the plain code, so the same token wins; of equal
sums the smaller token id. The log-probability differs from it by the order of the additions in the softmax.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tracefp4.kernels.elements import INTERPRETED, log1p

_WIDTH = 256
"""Tokens that a program of one warp looks at at once."""
_PROGRAMS = 2112
"""Programs that a launch aims at: sixteen for each multiprocessor. More would have shorter parts, which draw more."""
_LOG_2 = tl.constexpr(0.6931471805599453)
_SLACK = tl.constexpr(0.001)
"""Added to bounds, far more than all rounding on the way to them and to the noise."""


@triton.jit
def _mix(x):
    """SplitMix64's output function on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(key, token):
    """Gumbel noise of token ids under a mixed key; see :func:`tracefp4.rollout.sampler.gumbel`."""
    counter = (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (_mix(key + counter) >> 11).to(tl.int64, bitcast=True)
    uniform = (bits.to(tl.float32) + 0.5) * 1.1102230246251565e-16
    exponential = -log1p(-uniform)
    return -tl.log(exponential) if INTERPRETED else -libdevice.log(exponential)


@triton.jit
def _bound(key, token):
    """At least the Gumbel noise of token ids; 110 for those whose upper 32 random bits are zero."""
    counter = (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    upper = (_mix(key + counter) >> 32).to(tl.uint32).to(tl.float32)  # 2^32 u, rounded down but for its last bit
    return (159.0 - upper.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07) * _LOG_2 + _SLACK


@triton.jit
def _draw(
    logits_ptr, stream_ptr, position_ptr, temperature_ptr, floats_ptr, best_ptr, vocabulary, span, parts,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One row and one part of the vocabulary."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    stream = tl.load(stream_ptr + row).to(tl.uint64, bitcast=True)
    position = tl.load(position_ptr + row).to(tl.uint64, bitcast=True)
    key = _mix(stream + position * 0x9E3779B97F4A7C15)
    lane = tl.arange(0, WIDTH)
    # Eight neighbours lie in one thread: they share a running maximum.
    top = tl.full((WIDTH // 8,), float("-inf"), tl.float32)
    total = tl.zeros((WIDTH // 8,), tl.float32)
    best = tl.full((WIDTH,), float("-inf"), tl.float32)
    chosen = part * span + lane
    winner = float("-inf")
    for first in range(part * span, tl.minimum(part * span + span, vocabulary), WIDTH):
        token = first + lane
        real = token < vocabulary
        logit = tl.load(logits_ptr + row * vocabulary + token, mask=real, other=float("-inf")).to(tl.float32)
        scaled = logit
        if divisor != 1.0:
            scaled = tl.div_rn(logit, divisor + tl.zeros_like(logit))
        eights = tl.reshape(scaled, (WIDTH // 8, 8))
        higher = tl.maximum(top, tl.max(eights, axis=1))
        # Nothing but minus infinity so far: the difference would be a NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(eights - base[:, None]), axis=1)
        top = higher
        bound = scaled
        if temperature != 0.0:
            bound = scaled + _bound(key, token)
        if tl.max(bound, axis=0) > winner:
            sum_ = scaled
            if temperature != 0.0:
                sum_ = scaled + _gumbel(key, token)
            better = real & (sum_ > best)
            best = tl.where(better, sum_, best)
            chosen = tl.where(better, token, chosen)
            winner = tl.max(best, axis=0)
    highest = tl.max(top, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    place = row * parts + part
    tl.store(floats_ptr + place * 3, highest)
    tl.store(floats_ptr + place * 3 + 1, tl.sum(total * tl.exp(top - base), axis=0))
    tl.store(floats_ptr + place * 3 + 2, winner)
    tl.store(best_ptr + place, tl.min(tl.where(best == winner, chosen, 2**30), axis=0))


@triton.jit
def _finish(
    logits_ptr, temperature_ptr, floats_ptr, best_ptr, token_ptr, logprob_ptr, vocabulary, parts, PARTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    real = part < parts
    place = row * parts + part
    top = tl.load(floats_ptr + place * 3, mask=real, other=float("-inf"))
    total = tl.load(floats_ptr + place * 3 + 1, mask=real, other=0.0)
    best = tl.load(floats_ptr + place * 3 + 2, mask=real, other=float("-inf"))
    chosen = tl.load(best_ptr + place, mask=real, other=2**30)
    winner = tl.max(best, axis=0)
    token = tl.min(tl.where(best == winner, chosen, 2**30), axis=0)
    # Logits that hold a NaN have no winner.
    token = tl.where(token < vocabulary, token, 0)
    highest = tl.max(top, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    whole = tl.sum(total * tl.exp(top - base), axis=0)
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    logit = tl.load(logits_ptr + row * vocabulary + token).to(tl.float32)
    scaled = tl.div_rn(logit, divisor)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, scaled - base - tl.log(whole))


def sample(logits: Tensor, stream: Tensor, position: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token a row from the whole distribution.

    Args:
        logits: ``(B, V)``, any float dtype, ``V`` below 2^30.
        stream: int64 ``(B,)``.
        position: int64 ``(B,)``.
        temperature: float32 ``(B,)``; 0 for greedy.

    Returns:
        Tokens ``(B,)`` int64 and their log-probabilities ``(B,)`` float32, NaN where the logits hold a NaN.
    """
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _WIDTH)
    span = _WIDTH * max(1, min(blocks, blocks * rows // _PROGRAMS))
    parts = triton.cdiv(vocabulary, span)
    floats = torch.empty(rows, parts, 3, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _draw[(rows, parts)](
            logits, stream.contiguous(), position.contiguous(), temperature.contiguous(), floats, best, vocabulary,
            span, parts, WIDTH=_WIDTH, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        _finish[(rows,)](
            logits, temperature.contiguous(), floats, best, token, logprob, vocabulary, parts,
            PARTS=triton.next_power_of_2(parts), enable_fp_fusion=False,
        )  # fmt: skip
    return token, logprob
