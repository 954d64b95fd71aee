"""Which expert computes which rows, in which matrix products.

A router gives each token ``K`` experts; an expert's matrix product wants the rows of all its tokens. Each product
covers a *group* of consecutive experts, whose rows are padded with zeros to the longest of the group. Three strategies
form the groups, and lead to the same sums:

``loop``     one expert a group: no padding, one product for each expert that was hit. Best on the CPU.
``grouped``  up to 32 experts a group, as long as padding at most doubles the work. Few, large kernels: best for
             training and prefill on a GPU.
``dense``    all experts in one group, every token having a row in each: nothing about the routes has to be known on the
             host, so a decode step can be captured in a CUDA graph. The other two synchronise once, to learn how many
             rows each expert has.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from tracefp4.errors import ModelError

Strategy = Literal["auto", "loop", "grouped", "dense"]

DENSE_ROWS = 65536
"""``auto`` takes ``dense`` up to this many rows of the batched product (experts x tokens). On an H200, with 128 experts
of the Qwen3-30B-A3B shape, dense and grouped take equally long at twice as many."""
GROUP = 32
"""Most experts in a group of ``grouped``, and"""
GROUP_ROWS = 32768
"""most padded rows of several experts: they bound the float32 products that are alive at a time."""


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive experts that share one batched product."""

    first: int
    size: int
    capacity: int
    """Rows of each expert, after padding."""
    rows: slice
    """The group's rows among the pairs."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Which expert computes which rows.

    ``P = T * K`` pairs: row ``i`` of a pair tensor belongs to slot ``pairs[i] % K`` of token ``pairs[i] // K`` and is
    computed by expert ``experts[i]``, in row ``place[i]`` of its group's padded batch. Pairs are sorted by expert,
    except in a dense plan, where they stand in the order token, slot.
    """

    experts: Tensor
    """``(P,)`` int64."""
    pairs: Tensor
    """``(P,)`` int64, ``token * K + slot``."""
    tokens: Tensor
    """``(P,)`` int64, ``pairs // K``."""
    place: Tensor
    """``(P,)`` int64."""
    groups: tuple[Group, ...]
    num_tokens: int
    top_k: int
    num_experts: int
    dense: bool


def choose_strategy(num_tokens: int, num_experts: int, device: torch.device, training: bool) -> Strategy:
    """Return ``loop`` off CUDA; there ``dense`` for a small batch outside training and in a capture, else ``grouped``.

    Args:
        num_tokens: tokens of the batch.
        num_experts: experts of the layer.
        device: where the operands lie.
        training: whether gradients may be asked for, now or when a checkpointed layer is run again.
    """
    if device.type != "cuda":
        return "loop"
    if torch.cuda.is_current_stream_capturing() or (not training and num_tokens * num_experts <= DENSE_ROWS):
        return "dense"
    return "grouped"


def dispatch(top_k_index: Tensor, num_experts: int, strategy: Strategy) -> Dispatch:
    """Order the pairs of a batch and group the experts.

    Args:
        top_k_index: ``(T, K)`` integer expert ids; with ``dense`` the ids of one token must differ, as top-k's do.
        num_experts: experts of the layer.
        strategy: ``loop``, ``grouped`` or ``dense``.

    Raises:
        ModelError: an unknown strategy, or expert ids out of range (not checked with ``dense``).
    """
    if strategy not in ("loop", "grouped", "dense"):
        raise ModelError(f"unknown expert strategy {strategy!r}; valid are 'auto', 'loop', 'grouped' and 'dense'")
    num_tokens, top_k = top_k_index.shape
    experts = top_k_index.reshape(-1).long()
    if strategy == "dense":
        pairs = torch.arange(experts.numel(), device=experts.device)
        tokens = pairs // top_k
        groups = (Group(0, num_experts, num_tokens, slice(0, experts.numel())),)
        return Dispatch(
            experts, pairs, tokens, experts * num_tokens + tokens, groups, num_tokens, top_k, num_experts, True
        )
    experts, pairs = torch.sort(experts, stable=True)
    starts = torch.searchsorted(experts, torch.arange(num_experts + 1, device=experts.device))
    bounds = starts.tolist()
    if bounds[0] != 0 or bounds[-1] != experts.numel():
        raise ModelError(f"expert ids must lie in 0..{num_experts - 1}")
    groups = _groups(bounds, GROUP if strategy == "grouped" else 1)
    base = [0] * num_experts
    for group in groups:
        for member in range(group.size):
            base[group.first + member] = member * group.capacity
    rank = torch.arange(experts.numel(), device=experts.device) - starts[experts]
    place = torch.tensor(base, device=experts.device)[experts] + rank
    return Dispatch(experts, pairs, pairs // top_k, place, groups, num_tokens, top_k, num_experts, False)


def _groups(bounds: list[int], limit: int, tile: int = 32) -> tuple[Group, ...]:
    """Join consecutive experts while the padded batch has at most twice the rows that its experts use.

    Rows count in tiles, the least that a matrix product works on, so small experts join freely if every second was hit.
    """
    counts = [after - before for before, after in pairwise(bounds)]
    groups: list[Group] = []
    first = 0
    while first < len(counts):
        if not counts[first]:
            first += 1
            continue
        size, used, peak, last = 1, max(counts[first], tile), max(counts[first], tile), 1
        while size < limit and first + size < len(counts):
            count = counts[first + size]
            used += max(count, tile) if count else 0
            peak = max(peak, count)
            size += 1
            if size * peak > min(2 * used, GROUP_ROWS):
                break
            last = size if count else last
        members = counts[first : first + last]
        groups.append(Group(first, last, max(members), slice(bounds[first], bounds[first + last])))
        first += last
    return tuple(groups)
