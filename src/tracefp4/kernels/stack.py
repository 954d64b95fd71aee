"""Frames of several sequences into the tensors of a batch.

A frame holds its sections site after site, a batch the rows of all sequences site after site. On the host every part of
every sequence is a copy of its own, a dozen a sequence. Here the frames lie one after the other in the memory of the
device as they are, and one launch takes each byte to its place. Bytes, because a row may be nine of them; the memory
moves far less of them than it could.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tracefp4.kernels.sizes import cdiv

_BYTES = 4096
"""Bytes of a program."""


@triton.jit
def _stack(frames_ptr, source_ptr, strip_ptr, out_ptr, batch, BYTES: tl.constexpr):
    pair, site, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    strip, sequence = pair // batch, pair % batch
    sites, room = tl.load(strip_ptr + strip * 4), tl.load(strip_ptr + strip * 4 + 1)
    if (site < sites) & (block * BYTES < room):
        place, fill = tl.load(strip_ptr + strip * 4 + 2), tl.load(strip_ptr + strip * 4 + 3)
        start, step = tl.load(source_ptr + pair * 3), tl.load(source_ptr + pair * 3 + 1)
        length = tl.load(source_ptr + pair * 3 + 2)
        at = (block * BYTES + tl.arange(0, BYTES)).to(tl.int64)
        value = tl.load(frames_ptr + start + site * step + at, mask=at < length, other=0)
        padding = ((fill >> ((at & 3) * 8)) & 255).to(tl.uint8)
        value = tl.where(at < length, value, padding)
        tl.store(out_ptr + place + (site * batch + sequence) * room + at, value, mask=at < room)


def stack(frames: Tensor, sources: Tensor, strips: Tensor, out: Tensor, sites: int, room: int) -> None:
    """Copy the sections of ``B`` sequences.

    Args:
        frames: uint8, all frames.
        sources: int64 ``(S, B, 3)``: for each strip and sequence the first byte of its first site in ``frames``, bytes
            from a site's to the next site's, and bytes of each.
        strips: int64 ``(S, 4)``: sites of each strip, bytes of a sequence's entries in ``out``, the first byte in
            ``out``, and four bytes as a number that fill what a sequence leaves.
        out: uint8; a strip has ``(sites, B, bytes of a sequence)`` from its first byte on.
        sites: the most that a strip has.
        room: the most bytes of a sequence's entries that a strip has.
    """
    count, batch = sources.shape[:2]
    if count * batch * sites * room:
        _stack[(count * batch, sites, cdiv(room, _BYTES))](
            frames, sources, strips, out, batch, BYTES=_BYTES, num_warps=4
        )  # fmt: skip
