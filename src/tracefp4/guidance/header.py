"""The description at the start of a frame, and the exact place of every byte.

A frame is a prologue of 64 bytes, a header, and a body of sections, each at a multiple of 64 bytes so that it can be
mapped and viewed in place. ``docs/frame-format.md`` gives every byte. Where a section lies follows from the header's
shapes alone; the header names the places too, for readers in other languages, and a reader checks that both agree.
So no number in a header is ever trusted: each is bounded first, then everything else is computed from it and compared.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import xxhash

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import ConfigError, GuidanceCorrupt, GuidanceMismatch
from tracefp4.guidance.codec import CHECK_BYTES, chunks
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import record_bytes

MAGIC = b"\x89TFP4\r\n\x1a"
"""First bytes. Like those of PNG they show a transfer that changed line ends or dropped the eighth bit."""

VERSION = 1
"""Version of what follows the prologue. The prologue itself is the same in every version."""

ALIGN = 64
"""Sections start at multiples of this."""

PROLOGUE = 64
_PROLOGUE = struct.Struct("<8sHHIQ16s24s")
_CHECKSUM = slice(24, 40)


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest values that a reader accepts, checked before anything is allocated."""

    total_bytes: int = 1 << 36
    header_bytes: int = 1 << 20
    rows: int = 1 << 22
    sites: int = 1 << 12
    vectors: int = 1 << 10
    width: int = 1 << 20
    layers: int = 1 << 16


LIMITS = Limits()
"""Limits of this version."""

Section = tuple[int, int]
"""Offset from the start of the body, and length, in bytes."""


class SiteEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One site: its shape, and where its parts lie."""

    layer: int
    kind: str
    vectors: int
    width: int
    block: int
    token_scale: bool
    codes: Section
    block_scales: Section
    global_scales: Section | None
    checks: Section | None

    @property
    def shape(self) -> SiteShape:
        """The shape; raises ``ValueError`` for a kind that does not exist."""
        return SiteShape(Site(self.layer, Kind(self.kind)), self.vectors, self.width, self.block, self.token_scale)


class RoutesEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Expert routes ``(rows, layers, top_k)``."""

    dtype: Literal["uint8", "int16"]
    layers: int
    top_k: int
    section: Section

    @property
    def itemsize(self) -> int:
        """Bytes of one expert id."""
        return 1 if self.dtype == "uint8" else 2


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


RouteShape = tuple[Literal["uint8", "int16"], int, int]
"""Dtype, MoE layers and top-k of expert routes."""


def build_header(
    plan: Plan,
    shapes: Sequence[SiteShape],
    rows: int,
    *,
    routes: RouteShape | None = None,
    tokens: str = "0" * 32,
    numerics: str = "0" * 16,
    weights: int = 0,
) -> tuple[Header, int]:
    """The header of a frame with these sites, and the length of its body: sections in order, each aligned."""
    cursor = 0

    def place(length: int) -> Section:
        nonlocal cursor
        start = align(cursor)
        cursor = start + length
        return start, length

    valid = place(-(-rows // 8))
    entry = None
    if routes is not None:
        dtype, layers, top_k = routes
        entry = RoutesEntry(dtype, layers, top_k, place(rows * layers * top_k * (1 if dtype == "uint8" else 2)))
    sites = []
    for shape in sorted(shapes, key=lambda s: s.site):
        size = record_bytes(shape, plan.bits, plan.scale_bits)
        codes, scales = place(rows * size["codes"]), place(rows * size["block_scales"])
        global_scales = place(rows * size["global_scales"]) if shape.token_scale else None
        checks = place(chunks(rows) * CHECK_BYTES) if plan.scale_bits != 8 else None
        site = shape.site
        dims = (shape.vectors, shape.width, shape.block, shape.token_scale)
        sites.append(SiteEntry(site.layer, site.kind.value, *dims, codes, scales, global_scales, checks))
    return Header(str(plan), tokens, numerics, weights, rows, valid, entry, tuple(sites)), cursor


def sections(header: Header) -> Iterator[Section]:
    """Every section in the order of its place."""
    yield header.valid
    if header.routes is not None:
        yield header.routes.section
    for site in header.sites:
        yield from (s for s in (site.codes, site.block_scales, site.global_scales, site.checks) if s is not None)


def align(n: int) -> int:
    """The next multiple of 64."""
    return -(-n // ALIGN) * ALIGN


def header_problem(header: Header) -> str | None:
    """What is wrong with a header, as part of a sentence; ``None`` if nothing is."""
    try:
        plan = Plan.parse(header.plan)
    except ConfigError as error:
        return str(error)
    if str(plan) != header.plan:
        return f"plan {header.plan!r} is written {str(plan)!r}"
    if not re.fullmatch(r"[0-9a-f]{32}", header.tokens):
        return f"a token hash has 32 hex characters, got {header.tokens[:64]!r}"
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
    return _sites_problem(header.sites, plan)


def _sites_problem(sites: Sequence[SiteEntry], plan: Plan) -> str | None:
    known = {kind.value for kind in plan.kinds}
    before = (-1, "")
    for entry in sites:
        name = f"site {entry.layer}.{entry.kind[:32]}"
        if entry.kind not in known:
            return f"{name}: plan {str(plan)!r} has no such kind of site"
        if before[0] >= 0 and (entry.layer, entry.kind) <= before:
            return f"{name} comes after site {before[0]}.{before[1]}; sites are sorted and occur once"
        before = (entry.layer, entry.kind)
        vectors, width = entry.vectors, entry.width
        if not (0 <= entry.layer < LIMITS.layers and 1 <= vectors <= LIMITS.vectors and 1 <= width <= LIMITS.width):
            return (
                f"{name} has {vectors} vectors of {width} values, "
                f"at most {LIMITS.vectors} of {LIMITS.width} in {LIMITS.layers} layers are accepted"
            )
        if entry.block < 1 or entry.width % entry.block or entry.width % 8:
            return f"{name}: width {entry.width} is not a multiple of 8 and of the block size {entry.block}"
    return None


def seal(header: bytes, parts: Sequence[memoryview | bytes], total: int) -> bytes:
    """Join prologue, header and body into a frame of ``total`` bytes. ``parts`` is the whole body, gaps included."""
    head = header.ljust(align(PROLOGUE + len(header)) - PROLOGUE, b"\0")
    start = _PROLOGUE.pack(MAGIC, VERSION, 0, len(header), total, b"", b"")
    checksum = xxhash.xxh3_128(start[: _CHECKSUM.start])
    for part in (start[_CHECKSUM.stop :], head, *parts):
        checksum.update(part)
    return b"".join((start[: _CHECKSUM.start], checksum.digest(), start[_CHECKSUM.stop :], head, *parts))


def open_frame(frame: memoryview, label: str) -> tuple[Header, tuple[SiteShape, ...], int]:
    """Check a frame as a whole and read its header.

    Returns:
        the header, the shapes of its sites in order, and the offset of the body.

    Raises:
        GuidanceCorrupt: the frame is not whole, not ours, or says something impossible.
        GuidanceMismatch: a sound frame of another version.
    """
    length = _check_prologue(frame, label)
    version = int.from_bytes(frame[8:10], "little")
    if version != VERSION:
        raise GuidanceMismatch(f"{label} has version {version}, this reader knows version {VERSION}")
    raw = bytes(frame[PROLOGUE : PROLOGUE + length])
    try:
        header = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GuidanceCorrupt(f"{label}: its header of {length} bytes is no header: {error}") from None
    problem = header_problem(header)
    if problem is None and _ENCODER.encode(header) != raw:
        problem = "its header is not in canonical form"
    if problem is not None:
        raise GuidanceCorrupt(f"{label}: {problem}")
    shapes = tuple(entry.shape for entry in header.sites)
    _check_places(frame, header, shapes, length, label)
    return header, shapes, align(PROLOGUE + length)


def _check_prologue(frame: memoryview, label: str) -> int:
    """Everything that can be known without the header; returns the header's length."""
    size = len(frame)
    if size < PROLOGUE or frame[:8] != MAGIC:
        cut = size and frame[:8] == MAGIC[:size]
        what = f"cut off after {size} bytes" if cut else _foreign(bytes(frame[:8]))
        raise GuidanceCorrupt(f"{label} of {size} bytes is {what}; a frame has at least {PROLOGUE} bytes")
    _, _, reserved, length, total, checksum, rest = _PROLOGUE.unpack_from(frame)
    if total != size:
        raise GuidanceCorrupt(f"{label} has {size} bytes and says that it has {total}")
    if total > LIMITS.total_bytes or length > LIMITS.header_bytes or PROLOGUE + length > total:
        raise GuidanceCorrupt(
            f"{label} has a header of {length} bytes in {total}; at most {LIMITS.header_bytes} in {LIMITS.total_bytes} "
            "are accepted"
        )
    found = xxhash.xxh3_128(frame[: _CHECKSUM.start])
    found.update(frame[_CHECKSUM.stop :])
    if found.digest() != checksum:
        raise GuidanceCorrupt(f"{label} was altered: its checksum is {found.hexdigest()}, it says {checksum.hex()}")
    if reserved or any(rest):
        raise GuidanceCorrupt(f"{label} has reserved bytes that are not zero")
    return length


def _check_places(frame: memoryview, header: Header, shapes: Sequence[SiteShape], length: int, label: str) -> None:
    """The places in the header are the computed ones, the frame ends where the last section does, gaps are zero."""
    routes = header.routes
    expected, body = build_header(
        Plan.parse(header.plan),
        shapes,
        header.rows,
        routes=None if routes is None else (routes.dtype, routes.layers, routes.top_k),
        tokens=header.tokens,
        numerics=header.numerics,
        weights=header.weights,
    )
    start = align(PROLOGUE + length)
    if start + body != len(frame):
        raise GuidanceCorrupt(f"{label} has {len(frame)} bytes, its header describes {start + body}")
    if expected != header:
        raise GuidanceCorrupt(f"{label}: the places of its sections are not those that its shapes give")
    end = PROLOGUE + length
    for offset, size in sections(header):
        if any(frame[end : start + offset]):
            raise GuidanceCorrupt(f"{label}: bytes {end} to {start + offset} lie between sections and are not zero")
        end = start + offset + size


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
