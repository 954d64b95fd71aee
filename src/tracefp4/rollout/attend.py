"""Attention over stored K and V: by a kernel that reads the pages, or over what is gathered and dequantized.

Both ways read nothing but the cache. A prefill takes the newest tokens of each of several sequences over all of its
own; a decode step takes one token of each. :data:`Read` is the way without a kernel, and also the only one for a
model that stores latents, which have to be expanded first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracefp4.models.attention import dense_attention
from tracefp4.rollout.batch import Pieces

if TYPE_CHECKING:
    from tracefp4.kernels.attention_decode import PagedKV

Read = Callable[[Tensor], tuple[Tensor, Tensor]]
"""K and V ``(B, heads, L, width)`` of slots ``(B, L)``."""


def attend_prefill(
    q: Tensor,
    kv: PagedKV | None,
    read: Read,
    pieces: Pieces,
    *,
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of the newest tokens of several sequences.

    Args:
        q: ``(1, Hq, T, D)``, packed.
        kv: the layer as kernels read it, if it is stored for them.
        read: the same without kernels.
        pieces: which rows belong to which sequence, and where it is stored.
        scaling: factor on the logits.
        window: sliding window in tokens, the current one included; ``None`` for all.
        sinks: ``(Hq,)`` attention-sink logits, or ``None``.

    Returns:
        ``(1, T, Hq, Dv)``.
    """
    if kv is not None and q.dtype is torch.bfloat16:
        from tracefp4.kernels.attention_prefill import prefill_attention

        queries, longest = q[0].transpose(0, 1), max(pieces.counts)
        return prefill_attention(
            queries, kv, pieces.slots, pieces.table, longest, scaling, window, sinks
        ).unsqueeze(0)  # fmt: skip
    found = []
    for rows, context in pieces.parts():
        if window is not None:
            # The first query of the piece sees this far back, the others less.
            context = context[-(rows.stop - rows.start + window - 1) :]
        k, v = read(context.unsqueeze(0))
        found.append(dense_attention(q[:, :, rows], k, v, scaling=scaling, window=window, sinks=sinks))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def attend_decode(
    q: Tensor,
    kv: PagedKV | None,
    read: Read,
    pages: Tensor,
    context: Callable[[], Tensor],
    lengths: Tensor,
    *,
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
    max_batch: int,
) -> Tensor:
    """Attention of one token of each of ``B`` sequences. Static shapes, no host values.

    Args:
        q: ``(B, Hq, 1, D)``.
        kv: the layer as kernels read it, if it is stored for them.
        read: the same without kernels.
        pages: integer ``(B, W)`` block tables.
        context: gives int64 ``(B, L)``, slots of positions ``0..L-1``; asked where no kernel reads ``pages``.
        lengths: integer ``(B,)``: tokens to attend to, the current one included.
        scaling: factor on the logits.
        window: sliding window in tokens, the current one included; ``None`` for all.
        sinks: ``(Hq,)`` attention-sink logits, or ``None``.
        max_batch: sequences that decode at once at most; kernels cut their work accordingly.

    Returns:
        ``(B, 1, Hq, Dv)``.
    """
    if kv is not None:
        from tracefp4.kernels.attention_decode import decode_attention, fits, split_for

        if fits(q[:, :, 0], kv):
            span = split_for(max_batch, kv)
            return decode_attention(q[:, :, 0], kv, pages, lengths, scaling, window, sinks, span=span).unsqueeze(1)
    slots, last = context(), lengths.unsqueeze(1) - 1
    positions = torch.arange(slots.shape[1], device=slots.device).unsqueeze(0)
    if window is not None and window < slots.shape[1]:
        positions = last - torch.arange(window - 1, -1, -1, device=slots.device)
        slots = slots.gather(1, positions.clamp(min=0))
    mask = (positions >= 0) & (positions <= last)
    k, v = read(slots)
    return dense_attention(q, k, v, scaling=scaling, window=window, sinks=sinks, mask=mask[:, None, None])


def slots_of_pages(pages: Tensor, page_size: int) -> Tensor:
    """Slots ``(..., W * page_size)`` int64 of pages ``(..., W)``, in order."""
    inside = torch.arange(page_size, device=pages.device)
    return (pages.to(torch.int64).unsqueeze(-1) * page_size + inside).flatten(-2)
