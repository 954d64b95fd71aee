"""A record as bytes and back, checked before anything is believed.

``encode`` writes a record into one immutable buffer. ``decode`` gives it back without copying: the tensors of the
record share the memory of the buffer, which may be a mapped file. Between the two lies a network or a disk, and a
trainer that follows altered or misplaced guidance would train on noise without noticing. So ``decode`` accepts exactly
the bytes that ``encode`` produces, for exactly the sequence, plan, shapes, numerics and weights that the caller
expects, and says in one sentence what differs otherwise. Nothing is padded, cut or repaired.

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

import numpy as np
import torch
from torch import Tensor

from tracefp4.core import Site, SiteShape
from tracefp4.errors import ConfigError, GuidanceCorrupt, GuidanceError, GuidanceMismatch, GuidanceStale
from tracefp4.guidance.codec import chunks, clean_padding, scale_bytes
from tracefp4.guidance.header import (
    LIMITS,
    Header,
    RouteShape,
    SiteEntry,
    align,
    build_header,
    encode_header,
    header_problem,
    open_frame,
    seal,
    sections,
)
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, record_bytes, token_hash
from tracefp4.guidance.sizes import account, bytes_per_token, sizes

__all__ = ["LIMITS", "Expectation", "account", "bytes_per_token", "decode", "encode", "sizes"]

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
    header, body = build_header(
        plan,
        [_check_site(site, part, plan, record.rows) for site, part in record.sites.items()],
        record.rows,
        routes=routes,
        tokens=record.token_hash,
        numerics=record.numerics_hash,
        weights=record.weight_version,
    )
    problem = header_problem(header)
    raw = encode_header(header)
    total = align(64 + len(raw)) + body
    if problem is None and (len(raw) > LIMITS.header_bytes or total > LIMITS.total_bytes):
        problem = f"a header of {len(raw)} bytes in {total}, at most {LIMITS.header_bytes} in {LIMITS.total_bytes} fit"
    if problem is not None:
        raise GuidanceError(f"the record cannot be framed: {problem}")
    return seal(raw, _body(record, header), total)


def decode(
    buffer: bytes | bytearray | memoryview, expect: Expectation | None = None, *, label: str = "guidance frame"
) -> Record:
    """Read a frame.

    Args:
        buffer: the whole frame and nothing else; also a mapped file.
        expect: what it must agree with; ``None`` for a frame by itself.
        label: what messages call it, such as the sample's name.

    Returns:
        a record on the CPU whose tensors share the memory of ``buffer``: they are to be read, not written.

    Raises:
        GuidanceCorrupt: not exactly what :func:`encode` writes.
        GuidanceMismatch: sound, but of other tokens, another plan, model, numerics or frame version.
        GuidanceStale: sound, but of weights that are too old, or newer than the trainer's.
    """
    frame = _bytes_of(buffer, label)
    header, shapes, start = open_frame(frame, label)
    if expect is not None:
        check_expectation(header, shapes, expect, label)
    body = _tensor_of(frame)[start:]
    rows = header.rows
    sites: dict[Site, SiteRecord] = {}
    plan = Plan.parse(header.plan)
    for entry, shape in zip(header.sites, shapes, strict=True):
        sites[shape.site] = _read_site(body, entry, shape, rows, plan, label)
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


def check_expectation(
    header: Header, shapes: Sequence[SiteShape], expect: Expectation, label: str = "guidance frame"
) -> None:
    """Compare a sound header with what the caller expects; raises as :func:`decode` says."""
    if expect.plan is not None and header.plan != expect.plan:
        raise GuidanceMismatch(f"{label} has plan {header.plan!r}, expected {expect.plan!r}")
    if expect.numerics_hash is not None and header.numerics != expect.numerics_hash:
        raise GuidanceMismatch(
            f"{label} was recorded with numerics {header.numerics}, the trainer has {expect.numerics_hash}: "
            "both sides need the same spec and preset"
        )
    if expect.shapes is not None:
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
        return Plan.parse(record.plan)
    except ConfigError as error:
        raise GuidanceError(f"the record cannot be framed: {error}") from None


def _check_site(site: Site, part: SiteRecord, plan: Plan, rows: int) -> SiteShape:
    shape = part.shape
    if shape.site != site:
        raise GuidanceError(f"the record keeps site {shape.site} under {site}")
    if part.scale_bits != plan.scale_bits or part.bits != plan.bits:
        raise GuidanceError(
            f"site {site} has {part.bits} bits a code and {part.scale_bits} a scale, "
            f"plan {str(plan)!r} {plan.bits} and {plan.scale_bits}"
        )
    size = record_bytes(shape, plan.bits, plan.scale_bits)
    v = shape.vectors
    _check_tensor(f"{site} planes", part.planes, torch.uint8, (rows, v, size["codes"] // v))
    _check_tensor(f"{site} scales", part.scales, torch.uint8, (rows, v, size["block_scales"] // v))
    _check_tensor(f"{site} global_scale", part.global_scale, torch.float32, (rows, v) if shape.token_scale else None)
    _check_tensor(f"{site} checks", part.checks, torch.int32, (chunks(rows),) if plan.scale_bits != 8 else None)
    if not clean_padding(part.scales, plan.scale_bits, shape.width // shape.block):
        raise GuidanceError(f"site {site}: unused bits of its packed scales are not zero")
    return shape


def _check_tensor(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
    if tensor is None or shape is None:
        if tensor is not None or shape is not None:
            state = "is missing" if tensor is None else "must be None"
            raise GuidanceError(f"the record cannot be framed: {name} {state}")
    elif tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise GuidanceError(
            f"the record cannot be framed: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}"
        )


def _check_routes(routes: Tensor, rows: int) -> RouteShape:
    if routes.dtype not in (torch.uint8, torch.int16) or routes.ndim != 3 or routes.shape[0] != rows:
        raise GuidanceError(
            f"the record cannot be framed: routes are {routes.dtype} {tuple(routes.shape)}, "
            f"expected uint8 or int16 ({rows}, layers, top_k)"
        )
    return "uint8" if routes.dtype == torch.uint8 else "int16", routes.shape[1], routes.shape[2]


def _body(record: Record, header: Header) -> list[memoryview | bytes]:
    """Every section's bytes and the zeros between them."""
    tensors: list[Tensor | None] = [record.routes]
    for site in sorted(record.sites):
        part = record.sites[site]
        tensors += [part.planes, part.scales, part.global_scale, part.checks]
    data: list[memoryview | bytes] = [np.packbits(record.valid.cpu().numpy(), bitorder="little").tobytes()]
    data += [_raw(t) for t in tensors if t is not None]
    parts: list[memoryview | bytes] = []
    end = 0
    for (offset, size), piece in zip(sections(header), data, strict=True):
        parts += [bytes(offset - end), piece]
        end = offset + size
    return parts


def _raw(tensor: Tensor) -> memoryview | bytes:
    """A tensor's bytes on the host, copied only if it is not contiguous there already."""
    host = tensor.detach().cpu().contiguous()
    return host.numpy().data.cast("B") if host.numel() else b""


def _bytes_of(buffer: bytes | bytearray | memoryview, label: str) -> memoryview:
    try:
        return memoryview(buffer).cast("B")
    except TypeError as error:
        raise GuidanceCorrupt(f"{label} is no contiguous buffer of bytes: {error}") from None


def _tensor_of(frame: memoryview) -> Tensor:
    """The frame as uint8, sharing its memory; copied only when that is not aligned for the wider dtypes in it."""
    with _FREEZE, warnings.catch_warnings():
        # PyTorch has no read-only tensors and warns. Records of a frame are read-only by contract.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        tensor = torch.frombuffer(frame, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 8 == 0 else tensor.clone()


def _cut(body: Tensor, section: tuple[int, int]) -> Tensor:
    return body[section[0] : section[0] + section[1]]


def _read_site(body: Tensor, entry: SiteEntry, shape: SiteShape, rows: int, plan: Plan, label: str) -> SiteRecord:
    blocks = shape.width // shape.block
    scales = _cut(body, entry.block_scales).view(rows, shape.vectors, scale_bytes(blocks, plan.scale_bits))
    if not clean_padding(scales, plan.scale_bits, blocks):
        raise GuidanceCorrupt(f"{label} at site {shape.site}: unused bits of its packed scales are not zero")
    wide, checks = entry.global_scales, entry.checks
    return SiteRecord(
        shape=shape,
        planes=_cut(body, entry.codes).view(rows, shape.vectors, plan.bits * shape.width // 8),
        scales=scales,
        global_scale=None if wide is None else _cut(body, wide).view(torch.float32).view(rows, shape.vectors),
        checks=None if checks is None else _cut(body, checks).view(torch.int32),
        scale_bits=plan.scale_bits,
    )


def _read_valid(body: Tensor, header: Header, label: str) -> Tensor:
    bits = np.unpackbits(_cut(body, header.valid).numpy(), bitorder="little")
    if bits[header.rows :].any():
        raise GuidanceCorrupt(f"{label}: unused bits of its valid rows are not zero")
    return torch.from_numpy(bits[: header.rows].astype(bool))
