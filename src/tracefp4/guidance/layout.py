"""Where the sections of a frame lie.

A frame's body is a row of sections, each from a multiple of 64 bytes, in a fixed order: valid rows, routes, then site
after site its codes, block scales, global scales and checks. So the plan, the shapes of the sites, the number of rows
and the shape of the routes give every place, and a :class:`Layout` is all of that, worked out once and kept for the
next frame of equal length.

A model has many sites and few shapes. Layers repeat, so in a body the sections of equal sites mostly follow one another
at equal distances (a :class:`Run`), and one strided tensor covers that part of all of them::

    | codes 0 | scales 0 | codes 1 | scales 1 | codes 2 | scales 2 |       codes[l] = body[start + l * step ...]
      |<----- step ----->|

A body is therefore written and read in about ten operations instead of some hundreds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.guidance.codec import CHECK_BYTES, CHUNK, chunks, scale_bytes
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import record_bytes

ALIGN = 64
"""Sections start at multiples of this."""


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


class SiteEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One site: its shape, and where its parts lie."""

    layer: int
    kind: str
    vectors: int
    width: int
    block: int
    token_scale: bool
    codes: Section
    """Their checks, if the plan is a checked one."""
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


RouteShape = tuple[Literal["uint8", "int16"], int, int]
"""Dtype, MoE layers and top-k of expert routes."""


def align(n: int) -> int:
    """The next multiple of 64."""
    return -(-n // ALIGN) * ALIGN


class Run(NamedTuple):
    """Sites that differ in nothing but their layer, and between which the same sites lie each time."""

    sites: tuple[int, ...]
    """Indices into the table."""

    @property
    def second(self) -> int:
        """Index of the second site, or of the only one."""
        return self.sites[min(1, len(self.sites) - 1)]


@dataclass(frozen=True, eq=False, slots=True)
class SiteTable:
    """Sites in the order of a frame, and how they repeat. Compared by identity, see :func:`table_of`."""

    shapes: tuple[SiteShape, ...]
    runs: tuple[Run, ...]
    """Each site is in one of them. They do not depend on the number of rows, so all bodies with these sites share them.
    """

    def of(self, run: Run) -> tuple[SiteShape, ...]:
        """Shapes of a run."""
        return tuple(self.shapes[i] for i in run.sites)


def table_of(shapes: Sequence[SiteShape]) -> SiteTable:
    """The table of a model's sites, in any order: the same object for the same sites in the same order."""
    global _newest
    given, table = _newest
    if given is not shapes:  # else it was asked for the same tuple again, and its hundred sites need no comparing
        table = _kept_table(tuple(shapes))
        if isinstance(shapes, tuple):
            _newest = shapes, table
    return table


def make_table(shapes: Sequence[SiteShape]) -> SiteTable:
    """A new table of sites, in any order."""
    ordered = tuple(sorted(shapes, key=lambda s: s.site))
    looks = [(s.site.kind, s.vectors, s.width, s.block, s.token_scale) for s in ordered]
    runs: list[list[int]] = []
    newest: dict[object, list[int]] = {}
    for i, look in enumerate(looks):
        run = newest.get(look)
        if run is not None and (len(run) == 1 or looks[run[-2] : run[-1]] == looks[run[-1] : i]):
            run.append(i)
        else:
            newest[look] = [i]
            runs.append(newest[look])
    return SiteTable(ordered, tuple(Run(tuple(run)) for run in runs))


@lru_cache(maxsize=32)
def places_of(table: SiteTable) -> dict[Site, tuple[int, int]]:
    """For each site the index of its run, and its position in the run."""
    return {shape.site: (i, k) for i, run in enumerate(table.runs) for k, shape in enumerate(table.of(run))}


class Parts(NamedTuple):
    """The tensors of ``L`` sites of equal shape and ``T`` rows, as :class:`SiteRecord` has those of one."""

    planes: Tensor
    """uint8 ``(L, T, vectors, bits * width / 8)``."""
    scales: Tensor
    """uint8 ``(L, T, vectors, scale_bytes(width / block, scale_bits))``."""
    global_scale: Tensor | None
    """float32 ``(L, T, vectors)``."""
    code_checks: Tensor | None
    """int32 ``(L, T)`` under a checked plan, whose planes are empty."""
    checks: Tensor | None
    """int32 ``(L, ceil(T / 16))``."""


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """Every place in the body of a frame."""

    plan: Plan
    table: SiteTable
    rows: int
    valid: Section
    routes: RoutesEntry | None
    sites: tuple[SiteEntry, ...]
    size: int
    """Bytes of the body."""
    gaps: tuple[Section, ...]
    """First byte of what lies between two sections, and the byte after its last; always zeros."""
    problem: str | None
    """What is wrong with the sites (:func:`sites_problem`)."""

    def parts(self, frame: Tensor, start: int, run: Run) -> Parts:
        """Views of a run's sections.

        Args:
            frame: uint8, a frame at an address that is a multiple of 4.
            start: where its body starts, a multiple of 64.
            run: of the table.
        """
        entry, shape = self.sites[run.sites[0]], self.table.shapes[run.sites[0]]
        whole = (self.rows, shape.vectors)
        step = self.sites[run.second].codes[0] - entry.codes[0]

        def view(section: Section, dtype: torch.dtype, *dims: int) -> Tensor:
            size, strides = dtype.itemsize, [1]
            for dim in reversed(dims[1:]):
                strides.append(strides[-1] * dim)
            strides.append(step // size)
            flat = frame if size == 1 else frame[: len(frame) // size * size].view(dtype)
            return flat.as_strided((len(run.sites), *dims), strides[::-1], (start + section[0]) // size)

        blocks, checked = scale_bytes(shape.width // shape.block, self.plan.scale_bits), self.plan.checked
        return Parts(
            view(entry.codes, torch.uint8, *whole, 0 if checked else self.plan.bits * shape.width // 8),
            view(entry.block_scales, torch.uint8, *whole, blocks),
            None if entry.global_scales is None else view(entry.global_scales, torch.float32, *whole),
            view(entry.codes, torch.int32, self.rows) if checked else None,
            None if entry.checks is None else view(entry.checks, torch.int32, chunks(self.rows)),
        )


class Strip(NamedTuple):
    """One part of a run in the body of a frame, as bytes: those of ``sites`` sites, at equal distances."""

    sites: int
    start: int
    """Offset in the body of the first site's."""
    step: int
    """Bytes from a site's to the next site's."""
    length: int
    """Bytes of each site's."""
    tokens: int
    """Tokens of an entry: 16 of a check, else 1."""

    def view(self, memory: memoryview | np.ndarray, body: int, skip: int, length: int) -> np.ndarray:
        """Bytes ``skip`` to ``skip + length`` of each site's, ``(sites, length)``; the body starts at ``body``."""
        return np.ndarray((self.sites, length), np.uint8, memory, body + self.start + skip, (self.step, 1))


@lru_cache(maxsize=128)
def strips(layout: Layout) -> tuple[Strip, ...]:
    """Every part of every run: the same number in the same order for all layouts of a plan and a table."""
    found = []
    for run in layout.table.runs:
        entry = layout.sites[run.sites[0]]
        step = layout.sites[run.second].codes[0] - entry.codes[0]
        sections = (entry.codes, entry.block_scales, entry.global_scales, entry.checks)
        for section, tokens in zip(sections, (1, 1, 1, CHUNK), strict=True):
            if section is not None:
                found.append(Strip(len(run.sites), section[0], step, section[1], tokens))
    return tuple(found)


def copy_rows(source: Layout, data: np.ndarray, first: int, target: Layout, frame: memoryview, body: int) -> None:
    """Copy the sections of all sites from rows of one body to another, one strided copy for each part of each run.

    Args:
        source: where rows lie in ``data``, uint8 ``(source.size,)``.
        data: bytes of a body.
        first: the first row that is copied, a multiple of 16.
        target: same plan and table; all its rows are written.
        frame: writable.
        body: where the body starts in ``frame``.
    """
    for a, b in zip(strips(source), strips(target), strict=True):
        if b.length:
            entry = a.length // -(-source.rows // a.tokens)
            b.view(frame, body, 0, b.length)[...] = a.view(data, 0, first // a.tokens * entry, b.length)


_Dims = tuple[int, str, int, int, int, bool]
_Sections = tuple[Section, Section, Section | None, Section | None]


class _Fixed(NamedTuple):
    """What the layouts of a plan and a table share, whatever their rows."""

    dims: tuple[_Dims, ...]
    """First six fields of each site's entry."""
    row_bytes: tuple[tuple[int, int, int | None], ...]
    """Codes, block scales and global scales (``None`` without) in bytes a row, for each site."""
    problem: str | None


@lru_cache(maxsize=128)
def layout_of(plan: Plan, table: SiteTable, rows: int, routes: RouteShape | None) -> Layout:
    """The layout of a body, kept for the next one of the same kind."""
    return make_layout(plan, table, rows, routes, _kept_fixed(plan, table))


def make_layout(
    plan: Plan, table: SiteTable, rows: int, routes: RouteShape | None, fixed: _Fixed | None = None
) -> Layout:
    """The layout of a body: sections in order, each aligned.

    Nothing is allocated by ``rows``, so it may be any number that a frame claims.
    """
    fixed = fixed or _fixed(plan, table)
    checks = chunks(rows) * CHECK_BYTES if plan.scale_bits != 8 else None
    route_bytes = None
    if routes is not None:
        route_bytes = rows * routes[1] * routes[2] * (1 if routes[0] == "uint8" else 2)
    (valid, route_section), gaps, end = _place((-(-rows // 8), route_bytes))
    entry = None if routes is None else RoutesEntry(*routes, cast(Section, route_section))
    blocks: dict[object, tuple[list[Section | None], list[Section], int]] = {}
    sites = []
    for dims, row_bytes in zip(fixed.dims, fixed.row_bytes, strict=True):
        if row_bytes not in blocks:
            blocks[row_bytes] = _place((*(None if n is None else rows * n for n in row_bytes), checks))
        sections, within, length = blocks[row_bytes]
        start = align(end)
        if start != end:
            gaps.append((end, start))
        gaps += [(start + a, start + b) for a, b in within]
        own = cast(_Sections, tuple(None if s is None else (start + s[0], s[1]) for s in sections))
        sites.append(SiteEntry(*dims, *own))
        end = start + length
    return Layout(plan, table, rows, cast(Section, valid), entry, tuple(sites), end, tuple(gaps), fixed.problem)


def _place(lengths: Sequence[int | None]) -> tuple[list[Section | None], list[Section], int]:
    """Sections of these lengths one after the other, each aligned; the gaps between them, and the end."""
    sections: list[Section | None] = []
    gaps: list[Section] = []
    end = 0
    for length in lengths:
        if length is None:
            sections.append(None)
            continue
        start = align(end)
        if start != end:
            gaps.append((end, start))
        sections.append((start, length))
        end = start + length
    return sections, gaps, end


def _fixed(plan: Plan, table: SiteTable) -> _Fixed:
    dims: list[_Dims] = []
    row_bytes: list[tuple[int, int, int | None]] = []
    for shape in table.shapes:
        codes, scales, wide = record_bytes(shape, plan.bits, plan.scale_bits, plan.checked).values()
        dims.append(
            (shape.site.layer, shape.site.kind.value, shape.vectors, shape.width, shape.block, shape.token_scale)
        )
        row_bytes.append((codes, scales, wide if shape.token_scale else None))
    nowhere = tuple(SiteEntry(*own, (0, 0), (0, 0), None, None) for own in dims)
    return _Fixed(tuple(dims), tuple(row_bytes), sites_problem(nowhere, plan))


_kept_table = lru_cache(maxsize=32)(make_table)
_kept_fixed = lru_cache(maxsize=64)(_fixed)
_newest: tuple[Sequence[SiteShape], SiteTable] = ((), _kept_table(()))


def sites_problem(sites: Sequence[SiteEntry], plan: Plan) -> str | None:
    """What is wrong with the sites of a header, as part of a sentence; ``None`` if nothing is."""
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
