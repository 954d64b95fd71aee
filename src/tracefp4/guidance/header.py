"""The description at the start of a frame, and the exact place of every byte.

A frame is a prologue of 64 bytes, a header, and a body of sections, each at a multiple of 64 bytes so that it can be
mapped and viewed in place. ``docs/frame-format.md`` gives every byte. Where a section lies follows from the header's
shapes alone; the header names the places too, for readers in other languages, and a reader checks that both agree.
So no number in a header is ever trusted: each is bounded first, then everything else is computed from it and compared.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from tracefp4.core import SiteShape
from tracefp4.errors import ConfigError, GuidanceCorrupt, GuidanceError, GuidanceMismatch
from tracefp4.guidance.blocks import BLOCKS
from tracefp4.guidance.layout import (
    LIMITS,
    Layout,
    RoutesEntry,
    RouteShape,
    Section,
    SiteEntry,
    SiteTable,
    align,
    layout_of,
    make_layout,
    make_table,
    sites_problem,
)
from tracefp4.guidance.plan import Plan

MAGIC = b"\x89TFP4\r\n\x1a"
"""First bytes. Like those of PNG they show a transfer that changed line ends or dropped the eighth bit."""

VERSION = 1
"""Version of what follows the prologue. The prologue itself is the same in every version."""

PROLOGUE = 64
_PROLOGUE = struct.Struct("<8sHHIQ16s24s")
_CHECKSUM = slice(24, 40)
_NO_TOKENS = "0" * 32


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a frame says about itself. Stored as a msgpack map in this order of keys."""

    plan: str
    tokens: str
    numerics: str
    weights: int
    rows: int
    valid: Section
    routes: RoutesEntry | None
    sites: tuple[SiteEntry, ...]


def build_header(
    plan: Plan,
    shapes: Sequence[SiteShape],
    rows: int,
    *,
    routes: RouteShape | None = None,
    tokens: str = _NO_TOKENS,
    numerics: str = "0" * 16,
    weights: int = 0,
) -> tuple[Header, int]:
    """The header of a frame with these sites, and the length of its body: sections in order, each aligned."""
    layout = make_layout(plan, make_table(shapes), rows, routes)
    return header_of(layout, tokens, numerics, weights), layout.size


def header_of(layout: Layout, tokens: str, numerics: str, weights: int) -> Header:
    """The header of a frame with this body."""
    return Header(str(layout.plan), tokens, numerics, weights, layout.rows, layout.valid, layout.routes, layout.sites)


def sections(header: Header) -> Iterator[Section]:
    """Every section in the order of its place."""
    yield header.valid
    if header.routes is not None:
        yield header.routes.section
    for site in header.sites:
        yield from (s for s in (site.codes, site.block_scales, site.global_scales, site.checks) if s is not None)


def header_problem(header: Header, layout: Layout | None = None) -> str | None:
    """What is wrong with a header, as part of a sentence; ``None`` if nothing is.

    Args:
        header: of any origin.
        layout: one whose sites are the header's; what is wrong with them is known then.
    """
    try:
        plan, name = read_plan(header.plan)
    except ConfigError as error:
        return str(error)
    if header.plan not in (name, short_name(name)):
        return f"plan {header.plan!r} is written {name!r}"
    wrong_hash = _tokens_problem(header.tokens)
    if wrong_hash is not None:
        return wrong_hash
    if not re.fullmatch(r"[!-~]{1,64}", header.numerics):
        return f"a numerics hash has 1 to 64 printable characters, got {header.numerics[:64]!r}"
    if not 0 <= header.weights < 1 << 63:
        return f"a weight version lies in 0..2^63-1, got {header.weights}"
    if not 0 <= header.rows <= LIMITS.rows:
        return f"{header.rows} rows, at most {LIMITS.rows} are accepted"
    if header.routes is not None:
        layers, top_k = header.routes.layers, header.routes.top_k
        if not (1 <= layers <= LIMITS.layers and 1 <= top_k <= LIMITS.vectors):
            return f"routes of {layers} layers and top {top_k}, at most {LIMITS.layers} and {LIMITS.vectors} fit"
    if len(header.sites) > LIMITS.sites:
        return f"{len(header.sites)} sites, at most {LIMITS.sites} are accepted"
    if bool(header.sites) != bool(plan):
        return f"plan {header.plan!r} with {len(header.sites)} sites"
    return sites_problem(header.sites, plan) if layout is None else layout.problem


@lru_cache(maxsize=32)
def read_plan(text: str) -> tuple[Plan, str]:
    """A plan and its name as it is written; raises :class:`ConfigError` if there is no such plan."""
    plan = Plan.recorded(text)
    return plan, str(plan)


def short_name(name: str) -> str:
    """A plan's name as older frames have it: whole scales go without saying."""
    return name.removesuffix("/s8")


def _tokens_problem(tokens: str) -> str | None:
    return None if re.fullmatch(r"[0-9a-f]{32}", tokens) else f"a token hash has 32 hex characters, got {tokens[:64]!r}"


def frame_size(layout: Layout, numerics: str, weights: int) -> int:
    """Bytes of the frame that :func:`seal` writes; raises as it does."""
    return _start_of(layout, numerics, weights).total


def seal(
    layout: Layout, tokens: str, numerics: str, weights: int, fill: Callable[[memoryview, int], None]
) -> memoryview:
    """Write a frame.

    Args:
        layout: of the body.
        tokens: hash of the sequence.
        numerics: hash of the arithmetic.
        weights: version.
        fill: called with the frame and the offset of the body in it; writes every section.

    Returns:
        The frame, read-only. Nobody has a view of it that can be written to.

    Raises:
        GuidanceError: the header would say something impossible, or the frame is larger than the limits.
    """
    start = _start_of(layout, numerics, weights)
    problem = _tokens_problem(tokens)
    if problem is not None:
        raise GuidanceError(f"the record cannot be framed: {problem}")
    frame = BLOCKS.take(start.total)
    frame[: start.body] = b"".join((start.before, tokens.encode(), start.after))
    fill(frame, start.body)
    np.frombuffer(frame, np.uint8, offset=start.body)[_gap_bytes(layout)] = 0
    frame[_CHECKSUM] = checksum_of(frame)
    return frame.toreadonly()


class _Start(NamedTuple):
    """What stands before the body in every frame of a layout, but for the hash of the tokens and the checksum."""

    before: bytes
    """Up to the hash of the tokens."""
    after: bytes
    """From there to the body."""
    body: int
    """Offset of the body."""
    total: int
    """Bytes of the frame."""


@lru_cache(maxsize=128)
def _start_of(layout: Layout, numerics: str, weights: int) -> _Start:
    """Made once for frames of equal length; raises :class:`GuidanceError` if no such frame can be written."""
    header = header_of(layout, _NO_TOKENS, numerics, weights)
    raw = encode_header(header)
    body = align(PROLOGUE + len(raw))
    total = body + layout.size
    problem = header_problem(header, layout)
    if problem is None and (len(raw) > LIMITS.header_bytes or total > LIMITS.total_bytes):
        problem = f"a header of {len(raw)} bytes in {total}, at most {LIMITS.header_bytes} in {LIMITS.total_bytes} fit"
    if problem is not None:
        raise GuidanceError(f"the record cannot be framed: {problem}")
    # Only the plan stands before the tokens, and no plan contains their placeholder.
    before, _, after = raw.partition(_NO_TOKENS.encode())
    before = _PROLOGUE.pack(MAGIC, VERSION, 0, len(raw), total, b"", b"") + before
    return _Start(before, after + bytes(body - PROLOGUE - len(raw)), body, total)


def checksum_of(frame: memoryview) -> bytes:
    """XXH3, 128 bits, of everything in a frame but itself; Python lets other threads run meanwhile."""
    checksum = xxhash.xxh3_128(frame[: _CHECKSUM.start])
    checksum.update(frame[_CHECKSUM.stop :])
    return checksum.digest()


def opens_as(
    frame: memoryview, layout: Layout, tokens: str, numerics: str, weights: int, checksum: bytes | None = None
) -> int | None:
    """The offset of the body, if a frame is sound and is byte for byte headed as :func:`seal` heads one like this.

    That is one comparison, where reading a header of a hundred sites and checking all it says takes Python ten times as
    long. ``None`` says nothing of the frame: :func:`open_frame` does.

    Args:
        frame: all of it.
        layout: of the body.
        tokens: hash of the sequence.
        numerics: hash of the arithmetic.
        weights: version.
        checksum: what :func:`checksum_of` says of the frame, if it was asked already.
    """
    try:
        start = _start_of(layout, numerics, weights)
    except GuidanceError:
        return None
    head = b"".join((start.before, tokens.encode(), start.after))
    if len(frame) != start.total or bytes(frame[: _CHECKSUM.start]) != head[: _CHECKSUM.start]:
        return None
    if bytes(frame[_CHECKSUM.stop : start.body]) != head[_CHECKSUM.stop :]:
        return None
    if bytes(frame[_CHECKSUM]) != (checksum_of(frame) if checksum is None else checksum):
        return None
    gaps = np.frombuffer(frame, np.uint8, offset=start.body).take(_gap_bytes(layout))
    return None if gaps.any() else start.body


def open_frame(
    frame: memoryview, label: str, table: SiteTable | None = None, checksum: bytes | None = None
) -> tuple[Header, Layout, int]:
    """Check a frame as a whole and read its header.

    Args:
        frame: all of it.
        label: what messages call it.
        table: the sites that it should have. It may have others; if it has these, their places are known already and
            need only be compared.
        checksum: what :func:`checksum_of` says of it, if it was asked already.

    Returns:
        the header, the layout of the body, and the offset of the body.

    Raises:
        GuidanceCorrupt: the frame is not whole, not ours, or says something impossible.
        GuidanceMismatch: a sound frame of another version.
    """
    length = _check_prologue(frame, label, checksum)
    version = int.from_bytes(frame[8:10], "little")
    if version != VERSION:
        raise GuidanceMismatch(f"{label} has version {version}, this reader knows version {VERSION}")
    raw = bytes(frame[PROLOGUE : PROLOGUE + length])
    try:
        header = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GuidanceCorrupt(f"{label}: its header of {length} bytes is no header: {error}") from None
    layout = None if table is None else _known(header, table)
    problem = header_problem(header, layout)
    if problem is None and _ENCODER.encode(header) != raw:
        problem = "its header is not in canonical form"
    if problem is not None:
        raise GuidanceCorrupt(f"{label}: {problem}")
    if layout is None:
        layout = make_layout(
            Plan.recorded(header.plan),
            make_table([entry.shape for entry in header.sites]),
            header.rows,
            _route_shape(header),
        )
    _check_places(frame, header, layout, length, label)
    return header, layout, align(PROLOGUE + length)


def _known(header: Header, table: SiteTable) -> Layout | None:
    """The layout of a body with the sites of ``table``, if that is what an unchecked header describes."""
    if len(header.sites) != len(table.shapes) or not 0 <= header.rows <= LIMITS.rows:
        return None
    try:
        plan, _ = read_plan(header.plan)
    except ConfigError:
        return None
    layout = layout_of(plan, table, header.rows, _route_shape(header))
    return layout if layout.sites == header.sites else None


def _route_shape(header: Header) -> RouteShape | None:
    routes = header.routes
    return None if routes is None else (routes.dtype, routes.layers, routes.top_k)


def _check_prologue(frame: memoryview, label: str, checksum: bytes | None) -> int:
    """Everything that can be known without the header; returns the header's length."""
    size = len(frame)
    if size < PROLOGUE or frame[:8] != MAGIC:
        cut = size and frame[:8] == MAGIC[:size]
        what = f"cut off after {size} bytes" if cut else _foreign(bytes(frame[:8]))
        raise GuidanceCorrupt(f"{label} of {size} bytes is {what}; a frame has at least {PROLOGUE} bytes")
    _, _, reserved, length, total, said, rest = _PROLOGUE.unpack_from(frame)
    if total != size:
        raise GuidanceCorrupt(f"{label} has {size} bytes and says that it has {total}")
    if total > LIMITS.total_bytes or length > LIMITS.header_bytes or PROLOGUE + length > total:
        raise GuidanceCorrupt(
            f"{label} has a header of {length} bytes in {total}; at most {LIMITS.header_bytes} in {LIMITS.total_bytes} "
            "are accepted"
        )
    found = checksum_of(frame) if checksum is None else checksum
    if found != said:
        raise GuidanceCorrupt(f"{label} was altered: its checksum is {found.hex()}, it says {said.hex()}")
    if reserved or any(rest):
        raise GuidanceCorrupt(f"{label} has reserved bytes that are not zero")
    return length


def _check_places(frame: memoryview, header: Header, layout: Layout, length: int, label: str) -> None:
    """The places in the header are the computed ones, the frame ends where the last section does, gaps are zero."""
    start = align(PROLOGUE + length)
    if start + layout.size != len(frame):
        raise GuidanceCorrupt(f"{label} has {len(frame)} bytes, its header describes {start + layout.size}")
    if (header.valid, header.routes, header.sites) != (layout.valid, layout.routes, layout.sites):
        raise GuidanceCorrupt(f"{label}: the places of its sections are not those that its shapes give")
    body = np.frombuffer(frame, np.uint8, offset=start)
    if any(frame[PROLOGUE + length : start]) or body[_gap_bytes(layout)].any():
        gaps = [(PROLOGUE + length, start), *((start + a, start + b) for a, b in layout.gaps)]
        a, b = next((a, b) for a, b in gaps if any(frame[a:b]))
        raise GuidanceCorrupt(f"{label}: bytes {a} to {b} lie between sections and are not zero")


@lru_cache(maxsize=128)
def _gap_bytes(layout: Layout) -> np.ndarray:
    """Every byte of the body that lies between two sections, int64."""
    starts, stops = np.array(layout.gaps, np.int64).reshape(-1, 2).T
    lengths = stops - starts
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def _foreign(head: bytes) -> str:
    """A guess at what a buffer is, from its first bytes."""
    if not head:
        return "empty"
    known = {b"\x80": "a pickle", b"PK\x03\x04": "a zip archive, as torch.save writes", b"\x93NUMPY": "a NumPy file"}
    guess = next((f", perhaps {what}" for start, what in known.items() if head.startswith(start)), "")
    return f"no guidance frame: it starts with {head.hex(' ')}{guess}"


def encode_header(header: Header) -> bytes:
    """The header's bytes."""
    return _ENCODER.encode(header)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Header, strict=True)
