"""A record as bytes and back, checked before anything is believed.

``encode`` writes a record into one immutable buffer, ``encode_rows`` one sequence of a sheaf. ``decode`` gives it back
without copying: the tensors of the record share the memory of the buffer, which may be a mapped file. Between the two
lies a network or a disk, and a trainer that follows altered or misplaced guidance would train on noise without
noticing. So ``decode`` accepts exactly the bytes that ``encode`` produces, for exactly the sequence, plan, shapes,
numerics and weights that the caller expects, and says in one sentence what differs otherwise. Nothing is padded, cut or
repaired.

The order of checks: length and magic, limits, checksum of every byte, version, header (known fields only, canonical),
the place of every section computed anew, gaps and unused bits zero, then the caller's expectation. Nothing is
allocated from a number in the frame. The checksum (XXH3, 128 bits) is made against accidents, not against somebody who
forges frames; that is why everything after it is checked as strictly as if there were none.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tracefp4.core import Site, SiteShape
from tracefp4.errors import ConfigError, GuidanceCorrupt, GuidanceError, GuidanceMismatch, GuidanceStale
from tracefp4.guidance.codec import chunks, clean_padding, scale_bytes
from tracefp4.guidance.header import (
    LIMITS,
    Header,
    frame_size,
    header_of,
    open_frame,
    opens_as,
    read_plan,
    seal,
    short_name,
)
from tracefp4.guidance.layout import Layout, RouteShape, SiteTable, copy_rows, layout_of, table_of
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, token_hash
from tracefp4.guidance.runs import Body, SiteRuns
from tracefp4.guidance.sheaf import Sheaf
from tracefp4.guidance.sizes import account, bytes_per_token, sizes
from tracefp4.guidance.store import Pending, Source

__all__ = ["LIMITS", "Expectation", "account", "bytes_per_token", "decode", "encode", "encode_rows"]
__all__ += ["pending_rows", "sizes"]

_FREEZE = threading.Lock()


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a frame must agree with. ``None`` leaves a point open.

    Args:
        tokens: prompt and response ids of the sequence that is trained on, ``rows + 1`` of them.
        numerics_hash: hash of the trainer's numerics.
        plan: name of the plan.
        shapes: the sites that the plan selects in the trainer's model, in any order.
        weight_version: the trainer's current weights.
        max_lag: how many versions the rollout's weights may be behind.
        routes: MoE layers and top-k; the frame must carry routes of this shape.
    """

    tokens: Sequence[int] | None = None
    numerics_hash: str | None = None
    plan: str | None = None
    shapes: Sequence[SiteShape] | None = None
    weight_version: int | None = None
    max_lag: int = 0
    routes: tuple[int, int] | None = None


def encode(record: Record) -> bytes:
    """Write a record as a frame.

    Tensors on another device are copied to the host, which waits for it.

    Raises:
        GuidanceError: the record does not fit together (plan, shapes, dtypes, rows), or is larger than the limits.
    """
    plan = _plan(record)
    routes: RouteShape | None = None
    if record.routes is not None:
        routes = _check_routes(record.routes, record.rows)
    _check_tensor("valid", record.valid, torch.bool, (record.rows,))
    for site, part in record.sites.items():
        _check_site(site, part, plan, record.rows)
    layout = layout_of(plan, table_of([part.shape for part in record.sites.values()]), record.rows, routes)

    def fill(memory: memoryview, start: int) -> None:
        frame = torch.frombuffer(memory, dtype=torch.uint8)
        for run in layout.table.runs:
            places = [[None] * len(run.sites) if p is None else p.unbind(0) for p in layout.parts(frame, start, run)]
            for index, *own in zip(run.sites, *places, strict=True):
                part = record.sites[layout.table.shapes[index].site]
                tensors = (part.planes, part.scales, part.global_scale, part.code_checks, part.checks)
                for place, tensor in zip(own, tensors, strict=True):
                    if place is not None and tensor is not None:
                        place.copy_(tensor)
        _write_ends(frame[start:], layout, record.valid, record.routes)

    return bytes(seal(layout, record.token_hash, record.numerics_hash, record.weight_version, fill))


def encode_rows(
    sheaf: Sheaf, start: int, rows: int, *, token_hash: str, numerics_hash: str, weight_version: int
) -> memoryview:
    """Write one sequence of a sheaf as a frame, the same that :func:`encode` makes of a record of it.

    Args:
        sheaf: on the host.
        start: first row of the sequence, a multiple of 16.
        rows: of the sequence.
        token_hash: as in a record.
        numerics_hash: as in a record.
        weight_version: as in a record.

    Returns:
        The frame, read-only, in memory of :mod:`tracefp4.guidance.blocks`: nobody can write to it while it is held.

    Raises:
        GuidanceError: the sheaf has no such rows, or the frame is larger than the limits.
    """
    sheaf.check_rows(start, rows)
    data, valid = sheaf.arrays()
    layout = layout_of(sheaf.layout.plan, sheaf.layout.table, rows, None)

    def fill(frame: memoryview, body: int) -> None:
        copy_rows(sheaf.layout, data, start, layout, frame, body)
        bits = np.packbits(valid[start : start + rows], bitorder="little")
        frame[body + layout.valid[0] : body + sum(layout.valid)] = bits.data

    return seal(layout, token_hash, numerics_hash, weight_version, fill)


def pending_rows(
    sheaf: Sheaf, start: int, rows: int, *, token_hash: str, numerics_hash: str, weight_version: int
) -> Pending:
    """What :func:`encode_rows` writes, not written yet: the sheaf is kept until somebody claims the frame.

    Under a checked plan it is kept for as long as its bits may be pulled.

    Raises:
        GuidanceError: the sheaf has no such rows, or the frame would be larger than the limits.
    """
    sheaf.check_rows(start, rows)
    layout = layout_of(sheaf.layout.plan, sheaf.layout.table, rows, None)

    def take() -> memoryview:
        return encode_rows(
            sheaf, start, rows, token_hash=token_hash, numerics_hash=numerics_hash, weight_version=weight_version
        )

    source = Source(sheaf.pull, (start, rows)) if layout.plan.checked else None
    return Pending(frame_size(layout, numerics_hash, weight_version), take, lambda: None, source)


def _write_ends(body: Tensor, layout: Layout, valid: Tensor, routes: Tensor | None) -> None:
    """Write which rows are valid, and the routes."""
    bits = np.packbits(valid.cpu().numpy(), bitorder="little")
    _cut(body, layout.valid).copy_(torch.from_numpy(bits))
    if layout.routes is not None and routes is not None:
        _cut(body, layout.routes.section).view(routes.dtype).view(routes.shape).copy_(routes)


def decode(
    buffer: bytes | bytearray | memoryview,
    expect: Expectation | None = None,
    *,
    label: str = "guidance frame",
    checksum: bytes | None = None,
) -> Record:
    """Read a frame.

    Args:
        buffer: the whole frame and nothing else; also a mapped file.
        expect: what it must agree with; ``None`` for a frame by itself.
        label: what messages call it, such as the sample's name.
        checksum: what :func:`tracefp4.guidance.header.checksum_of` says of the frame, if it was asked already.

    Returns:
        a record on the CPU whose tensors share the memory of ``buffer``: they are to be read, not written.

    Raises:
        GuidanceCorrupt: not exactly what :func:`encode` writes.
        GuidanceMismatch: sound, but of other tokens, another plan, model, numerics or frame version.
        GuidanceStale: sound, but of weights that are too old, or newer than the trainer's.
    """
    frame = _bytes_of(buffer, label)
    table = None if expect is None or expect.shapes is None else table_of(expect.shapes)
    opened = None if expect is None or table is None else _open_expected(frame, expect, table, checksum)
    header, layout, start = opened or open_frame(frame, label, table, checksum)
    if expect is not None and opened is None:
        check_expectation(header, layout.table.shapes, expect, label, same_sites=layout.table is table)
    whole = _tensor_of(frame)
    body, rows = whole[start:], header.rows
    sites = _read_sites(whole, layout, start, label)
    routes = None
    if header.routes is not None:
        r = header.routes
        dtype = torch.uint8 if r.dtype == "uint8" else torch.int16
        routes = _cut(body, r.section).view(dtype).view(rows, r.layers, r.top_k)
    return Record(
        plan=header.plan,
        token_hash=header.tokens,
        numerics_hash=header.numerics,
        weight_version=header.weights,
        rows=rows,
        valid=_read_valid(body, header, label),
        sites=sites,
        routes=routes,
    )


def _open_expected(
    frame: memoryview, expect: Expectation, table: SiteTable, checksum: bytes | None
) -> tuple[Header, Layout, int] | None:
    """As :func:`open_frame`, of a frame that is sound and all that is expected of it; ``None`` for any other."""
    tokens, numerics, weights = expect.tokens, expect.numerics_hash, expect.weight_version
    if tokens is None or expect.plan is None or numerics is None or weights is None or expect.routes is not None:
        return None
    try:
        plan, name = read_plan(expect.plan)
        own = token_hash(tokens)
    except (ConfigError, GuidanceError):
        return None
    if expect.plan not in (name, short_name(name)):
        return None
    layout = layout_of(plan, table, len(tokens) - 1, None)
    start = opens_as(frame, layout, own, numerics, weights, checksum)
    return None if start is None else (header_of(layout, own, numerics, weights), layout, start)


def check_expectation(
    header: Header,
    shapes: Sequence[SiteShape],
    expect: Expectation,
    label: str = "guidance frame",
    *,
    same_sites: bool = False,
) -> None:
    """Compare a sound header with what the caller expects; raises as :func:`decode` says.

    ``same_sites``: ``shapes`` were compared already, and are the expected ones.
    """
    if expect.plan is not None and short_name(header.plan) != short_name(expect.plan):
        raise GuidanceMismatch(f"{label} has plan {header.plan!r}, expected {expect.plan!r}")
    if expect.numerics_hash is not None and header.numerics != expect.numerics_hash:
        raise GuidanceMismatch(
            f"{label} was recorded with numerics {header.numerics}, the trainer has {expect.numerics_hash}: "
            "both sides need the same spec and preset"
        )
    if expect.shapes is not None and not same_sites:
        _compare_shapes(shapes, expect.shapes, label)
    if expect.routes is not None:
        found = None if header.routes is None else (header.routes.layers, header.routes.top_k)
        if found != tuple(expect.routes):
            have = "no routes" if found is None else f"routes of {found[0]} layers and top {found[1]}"
            raise GuidanceMismatch(f"{label} has {have}, expected {expect.routes[0]} layers and top {expect.routes[1]}")
    if expect.tokens is not None:
        if header.rows != len(expect.tokens) - 1:
            raise GuidanceMismatch(
                f"{label} has {header.rows} rows, "
                f"a sequence of {len(expect.tokens)} tokens has {len(expect.tokens) - 1}"
            )
        own = token_hash(expect.tokens)
        if header.tokens != own:
            raise GuidanceMismatch(f"{label} belongs to tokens with hash {header.tokens}, these have {own}")
    if expect.weight_version is not None:
        lag = expect.weight_version - header.weights
        if not 0 <= lag <= expect.max_lag:
            side = f"{lag} versions behind, at most {expect.max_lag} allowed" if lag > 0 else "newer than the trainer's"
            raise GuidanceStale(
                f"{label} was recorded with weights {header.weights}, the trainer has {expect.weight_version}: {side}"
            )


def _compare_shapes(found: Sequence[SiteShape], expected: Sequence[SiteShape], label: str) -> None:
    have, want = {s.site: s for s in found}, {s.site: s for s in expected}
    for site in sorted(have.keys() | want.keys()):
        if have.get(site) != want.get(site):
            raise GuidanceMismatch(
                f"{label} at site {site}: recorded {_say(have.get(site))}, expected {_say(want.get(site))}"
            )


def _say(shape: SiteShape | None) -> str:
    if shape is None:
        return "nothing"
    scale = "a global scale each" if shape.token_scale else "a constant global scale"
    return f"{shape.vectors} x {shape.width} values in blocks of {shape.block} with {scale}"


def _plan(record: Record) -> Plan:
    try:
        return Plan.recorded(record.plan)
    except ConfigError as error:
        raise GuidanceError(f"the record cannot be framed: {error}") from None


def _check_site(site: Site, part: SiteRecord, plan: Plan, rows: int) -> None:
    shape, bits = part.shape, plan.scale_bits
    if shape.site != site:
        raise GuidanceError(f"the record keeps site {shape.site} under {site}")
    kept = 0 if plan.checked else plan.bits
    if part.scale_bits != bits or part.bits != kept:
        raise GuidanceError(
            f"site {site} has {part.bits} bits a code and {part.scale_bits} a scale, "
            f"plan {str(plan)!r} {kept} and {bits}"
        )
    v, blocks = shape.vectors, shape.width // shape.block
    for name, dtype, dims in (
        ("planes", torch.uint8, (rows, v, shape.width * kept // 8)),
        ("scales", torch.uint8, (rows, v, scale_bytes(blocks, bits))),
        ("global_scale", torch.float32, (rows, v) if shape.token_scale else None),
        ("checks", torch.int32, (chunks(rows),) if bits != 8 else None),
        ("code_checks", torch.int32, (rows,) if plan.checked else None),
    ):
        _check_tensor(name, getattr(part, name), dtype, dims, site)
    if not clean_padding(part.scales, bits, blocks):
        raise GuidanceError(f"site {site}: unused bits of its packed scales are not zero")


def _check_tensor(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...] | None, site: Site | None = None
) -> None:
    if tensor is None and shape is None:
        return
    if tensor is not None and shape is not None and tensor.dtype == dtype and tensor.shape == shape:
        return
    what = f"the record cannot be framed: {name if site is None else f'{site} {name}'}"
    if tensor is None or shape is None:
        raise GuidanceError(f"{what} {'is missing' if tensor is None else 'must be None'}")
    raise GuidanceError(f"{what} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")


def _check_routes(routes: Tensor, rows: int) -> RouteShape:
    if routes.dtype not in (torch.uint8, torch.int16) or routes.ndim != 3 or routes.shape[0] != rows:
        raise GuidanceError(
            f"the record cannot be framed: routes are {routes.dtype} {tuple(routes.shape)}, "
            f"expected uint8 or int16 ({rows}, layers, top_k)"
        )
    return "uint8" if routes.dtype == torch.uint8 else "int16", routes.shape[1], routes.shape[2]


def _bytes_of(buffer: bytes | bytearray | memoryview, label: str) -> memoryview:
    try:
        return memoryview(buffer).cast("B")
    except TypeError as error:
        raise GuidanceCorrupt(f"{label} is no contiguous buffer of bytes: {error}") from None


def _tensor_of(frame: memoryview) -> Tensor:
    """The frame as uint8, sharing its memory; copied only when that is not aligned for the wider dtypes in it."""
    _hush()
    tensor = torch.frombuffer(frame, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 8 == 0 else tensor.clone()


@lru_cache(maxsize=1)
def _hush() -> None:
    """PyTorch has no read-only tensors and warns, once a process. Records of a frame are read-only by contract."""
    with _FREEZE, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        torch.frombuffer(b"\0", dtype=torch.uint8)


def _cut(body: Tensor, section: tuple[int, int]) -> Tensor:
    return body[section[0] : section[0] + section[1]]


def _read_sites(frame: Tensor, layout: Layout, start: int, label: str) -> SiteRuns:
    """Views of every site."""
    bits, table = layout.plan.scale_bits, layout.table
    parts = tuple(layout.parts(frame, start, run) for run in table.runs)
    sites = SiteRuns(table, parts, bits, Body(frame, layout, start))
    shapes = [table.shapes[run.sites[0]] for run in table.runs]
    clean = all(clean_padding(p.scales, bits, s.width // s.block) for s, p in zip(shapes, parts, strict=True))
    for site, part in () if clean else sites.items():
        if not clean_padding(part.scales, bits, part.shape.width // part.shape.block):
            raise GuidanceCorrupt(f"{label} at site {site}: unused bits of its packed scales are not zero")
    return sites


def _read_valid(body: Tensor, header: Header, label: str) -> Tensor:
    bits = np.unpackbits(_cut(body, header.valid).numpy(), bitorder="little")
    if bits[header.rows :].any():
        raise GuidanceCorrupt(f"{label}: unused bits of its valid rows are not zero")
    return torch.from_numpy(bits[: header.rows].astype(bool))
