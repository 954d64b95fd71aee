"""Ordinary numbers in the places where a run would have left some.

A benchmark that reads zeros flatters itself: nothing toggles, so a GPU needs less power and keeps a higher clock, and
tokens that are alike choose the same experts. So pools are filled through their own ``write``, with what K and V of a
model look like (normal, with a deviation of one), states with what a gated delta net keeps (keys of length one times
values), and packed codes with random ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracefp4.rollout.embedded import EmbeddedEngine
from tracefp4.rollout.pool import KVPool
from tracefp4.rollout.state import StatePool

if TYPE_CHECKING:
    from tracefp4.kernels.attention_decode import PagedKV
    from tracefp4.kernels.rules import Rules

AT_ONCE = 1 << 16
"""Slots that are written together."""
STATE = 0.1
"""Deviation of the numbers of a recurrent matrix."""


def fill_engine(engine: EmbeddedEngine, seed: int = 0) -> None:
    """Fill the KV pool and the states of an engine at rest; whatever it has cached is gone.

    Args:
        engine: warm, since the first prefill tells the shapes of states.
        seed: of all numbers.
    """
    fill_pool(engine.pool, seed)
    fill_states(engine.states, seed)


@torch.no_grad()
def fill_pool(pool: KVPool, seed: int = 0) -> None:
    """Store random K and V (or latents) in every slot of every layer."""
    device, form = pool._stack.codes.device, pool.format
    generator = torch.Generator(device=device).manual_seed(seed)
    for layer in pool._planes:
        for first in range(0, pool._slots, AT_ONCE):
            slots = torch.arange(first, min(first + AT_ONCE, pool._slots), device=device)
            pool.write(layer, slots, {
                kind: torch.randn(len(slots), *size, generator=generator, device=device, dtype=form.dtype)
                for kind, size in form.sizes.items()
            })  # fmt: skip


@torch.no_grad()
def fill_states(states: StatePool, seed: int = 0) -> None:
    """Random states in every row, as far as a prefill has told their shapes."""
    for layer, (conv, recurrent) in states._states.items():
        generator = torch.Generator(device=conv.device).manual_seed(seed + layer)
        conv.normal_(generator=generator)
        recurrent.normal_(std=STATE, generator=generator)


def fill_kv(kv: PagedKV, made: Rules | None, seed: int = 0) -> None:
    """Store random K and V in every slot of a layer that kernels read, rounded by ``made`` if it is quantized."""
    from tracefp4.kernels.kv_append import append

    device = kv.codes.device
    generator = torch.Generator(device=device).manual_seed(seed)
    for first in range(0, len(kv.codes), AT_ONCE):
        slots = torch.arange(first, min(first + AT_ONCE, len(kv.codes)), device=device)
        shape = (2, len(slots), kv.heads, kv.width)
        k, v = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        append(k, v, kv, made, slots)


def fill_codes(codes: Tensor, scales: Tensor, mx: bool) -> None:
    """Random codes and scales of ordinary size in place of a packed weight.

    Args:
        codes: int16 words.
        scales: uint8, recoded E4M3 scales or those of MXFP4.
        mx: which of them.
    """
    codes.view(torch.uint8).random_(0, 256)
    low, high = (124, 130) if mx else (70, 100)
    scales.random_(low, high)


def distinct_tokens(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """``count`` random token ids, no two the same as far as the vocabulary reaches."""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[i % vocabulary] for i in range(count)]
