"""Sampling on the device, with random numbers that belong to a token and not to a batch.

Token ``i`` wins if ``l_i / T + g_i`` is largest, ``l`` the logits and ``g_i`` independent Gumbel noise: then ``i`` is
distributed as ``softmax(l / T)`` (Gumbel-max, E. J. Gumbel 1954). Unlike a search in cumulative probabilities this is
*stable*: a rounding difference in the logits changes the winner only if the first two were nearly level, wherever they
stand in the vocabulary. The same request in another batch, whose logits differ in their last bits, therefore samples
the same tokens as long as the arithmetic allows.

The noise is a function of ``(seed, sample, position, token id)`` through the integer mixer of SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). There is no generator state: neither the
order of requests, nor the batch, nor a retraction changes what a sequence draws.

On a GPU one kernel does all of it, unless something is cut off (:mod:`tracefp4.kernels.sample`).

The log-probability of the chosen token is taken from ``softmax(l / T)``, *before* top-k and top-p. A temperature of 0
is greedy: the largest logit, with its log-probability at temperature 1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.kernels.runtime import usable

_GOLDEN = -0x61C8864680B583EB
"""0x9E3779B97F4A7C15, the increment of SplitMix64, as a signed 64-bit integer."""
_FIRST = -0x40A7B892E31B1A47
"""0xBF58476D1CE4E5B9."""
_SECOND = -0x6B2FB644ECCEEE15
"""0x94D049BB133111EB."""


@dataclass(slots=True)
class Draw:
    """Sampling parameters of ``B`` rows, all on the device."""

    stream: Tensor
    """``(B,)`` int64 from :func:`stream_key`."""
    position: Tensor
    """``(B,)`` int64: position of the token to be sampled."""
    temperature: Tensor
    """``(B,)`` float32; 0 for greedy."""
    top_k: Tensor
    """``(B,)`` int64; 0 for all."""
    top_p: Tensor
    """``(B,)`` float32; 1 for all."""


def stream_key(seed: int | str, sample: int) -> int:
    """Key of one sample's random numbers, a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed!r}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def sample(logits: Tensor, draw: Draw, truncate: bool = False) -> tuple[Tensor, Tensor]:
    """Sample one token a row. Never waits for the device.

    Args:
        logits: ``(B, V)``, any float dtype.
        draw: parameters of the rows.
        truncate: whether any row has top-k or top-p; known on the host, because it decides whether to sort.

    Returns:
        Tokens ``(B,)`` int64 and their log-probabilities ``(B,)`` float32, NaN where the logits hold a NaN.
    """
    if not truncate and usable(logits):
        from tracefp4.kernels.sample import sample as by_kernel

        return by_kernel(logits, draw.stream, draw.position, draw.temperature)
    greedy = draw.temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, draw.temperature).unsqueeze(-1)
    logprobs = torch.log_softmax(scaled, dim=-1)
    candidates = truncated(scaled, draw.top_k, draw.top_p) if truncate else scaled
    noise = gumbel(draw.stream, draw.position, logits.shape[-1])
    tokens = (candidates + noise.masked_fill_(greedy.unsqueeze(-1), 0.0)).argmax(dim=-1)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def top_logprobs(logits: Tensor, draw: Draw, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row and their log-probabilities, before top-k and top-p.

    Args:
        logits: ``(B, V)``, any float dtype.
        draw: parameters of the rows.
        count: how many, at most ``V``.

    Returns:
        Ids ``(B, count)`` int64 and log-probabilities ``(B, count)`` float32, likeliest first.
    """
    scaled = logits.float() / torch.where(draw.temperature == 0, 1.0, draw.temperature).unsqueeze(-1)
    values, ids = torch.log_softmax(scaled, dim=-1).topk(count, dim=-1)
    return ids, values


def truncated(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set logits outside of top-k and, of what is left, outside of top-p to minus infinity.

    Top-p keeps the likeliest tokens until their probabilities, renormalised after top-k, reach ``p``; the one that
    reaches it is kept. Of equal logits the smaller token id counts as likelier. One token always stays.

    Args:
        scaled: ``(B, V)`` float32, logits after temperature.
        top_k: ``(B,)`` int64; 0 for all.
        top_p: ``(B,)`` float32; 1 for all.
    """
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    limit = torch.where(top_k > 0, top_k, scaled.shape[-1])
    ordered = ordered.masked_fill(rank >= limit.unsqueeze(-1), float("-inf"))
    probabilities = torch.softmax(ordered, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    cut = (before >= top_p.unsqueeze(-1)) & (top_p < 1).unsqueeze(-1) & (rank > 0)
    ordered = ordered.masked_fill_(cut, float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, order, ordered)


def gumbel(stream: Tensor, position: Tensor, size: int) -> Tensor:
    """Gumbel noise ``(B, size)`` float32, a function of its arguments alone.

    ``-log(E)`` for exponential ``E = -log(1 - u)`` with ``u`` in (0, 1) made of 53 random bits. Small ``u``, which
    make the large values that win, keep float32's full relative precision this way.

    Args:
        stream: ``(B,)`` int64.
        position: ``(B,)`` int64.
        size: noise values a row.
    """
    uniform = random_bits(stream, position, size).float().add_(0.5).mul_(2.0**-53)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def random_bits(stream: Tensor, position: Tensor, size: int) -> Tensor:
    """53 random bits for each token id, ``(B, size)`` int64; the arguments are those of :func:`gumbel`."""
    key = _mix(stream + position * _GOLDEN)
    return _shift(_mix(key.unsqueeze(-1) + counters(stream, size)), 11)


@torch.library.custom_op("tracefp4::counters", mutates_args=())
def counters(like: Tensor, size: int) -> Tensor:
    """``(size,)`` int64 on the device of ``like``: the counter of each token id, multiples of the increment from 1 on.

    An operator, because a compiler must not look inside: PyTorch's would fold the multiplication into the index of an
    element, which its GPU code computes in 32 bits, and the product needs all 64 (and wraps around in them).
    """
    return torch.arange(1, size + 1, device=like.device) * _GOLDEN


@counters.register_fake
def _(like: Tensor, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device=like.device)


def _mix(x: Tensor) -> Tensor:
    """The output function of SplitMix64: 64 well mixed bits from a counter. Multiplication wraps around."""
    x = (x ^ _shift(x, 30)).mul_(_FIRST)
    x = (x ^ _shift(x, 27)).mul_(_SECOND)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)
