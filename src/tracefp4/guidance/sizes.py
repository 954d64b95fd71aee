"""What a plan costs in bytes, part by part.

``bytes_per_token`` is what grows with the sequence: codes, block scales, global scales and checks. ``sizes`` is a whole
frame to the byte, with its routes, valid rows, header and alignment; ``account`` splits a frame that exists. The two
agree, so a plan can be priced before anything is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable

from tracefp4.core import SiteShape
from tracefp4.guidance.codec import CHECK_BYTES, CHUNK
from tracefp4.guidance.header import Header, build_header, encode_header, open_frame
from tracefp4.guidance.layout import RouteShape
from tracefp4.guidance.layout import align as _align
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import record_bytes

SITE_PARTS = ("codes", "code_checks", "block_scales", "global_scales", "checks")
"""Parts of a site: bits of its codes, or in a checked plan their checks; its scales, and the checks of these."""
PARTS = (*SITE_PARTS, "routes", "valid", "header", "alignment")
"""Parts of a frame, in the order of the tables below."""


def bytes_per_token(plan: Plan, shapes: Iterable[SiteShape], num_layers: int) -> float:
    """Bytes of guidance that one more token costs: all of a plan's sites, without routes, header and what is pulled.

    Args:
        plan: what is recorded.
        shapes: all site shapes of the model.
        num_layers: decoder layers of the model.
    """
    chosen = plan.select(shapes, num_layers)
    return sum(site_bytes(shape, plan.bits, plan.scale_bits, plan.checked) for shape in chosen)


def site_bytes(shape: SiteShape, bits: int, scale_bits: int, checked: bool = False) -> float:
    """Bytes a token of one site: codes or their check, block scales, global scales, and its share of a check."""
    check = CHECK_BYTES / CHUNK if scale_bits != 8 else 0.0
    return sum(record_bytes(shape, bits, scale_bits, checked).values()) + check


def sizes(
    plan: Plan,
    shapes: Iterable[SiteShape],
    rows: int,
    *,
    num_layers: int | None = None,
    routes: RouteShape | None = None,
    weight_version: int = 0,
) -> dict[str, int]:
    """Bytes of each part of one frame, exactly as :func:`~tracefp4.guidance.frame.encode` writes it.

    Args:
        plan: what is recorded.
        shapes: the recorded sites, or with ``num_layers`` all sites of the model, of which the plan selects.
        rows: tokens minus one.
        num_layers: decoder layers of the model.
        routes: dtype, MoE layers and top-k of expert routes, if the frame carries them.
        weight_version: a large one takes a few bytes more in the header.

    Returns:
        the parts of :data:`PARTS` and their sum, ``total``. Numerics hashes are taken to have 16 characters.
    """
    chosen = tuple(shapes) if num_layers is None else plan.select(shapes, num_layers)
    header, body = build_header(plan, chosen, rows, routes=routes, weights=weight_version)
    length = len(encode_header(header))
    return _split(header, length, _align(64 + length) + body)


def account(frame: bytes | bytearray | memoryview, label: str = "guidance frame") -> dict[str, int]:
    """Bytes of each part of a frame that exists. Raises a :class:`~tracefp4.errors.GuidanceError` if it is unsound."""
    view = memoryview(frame).cast("B")
    header = open_frame(view, label)[0]
    return _split(header, len(encode_header(header)), len(view))


def by_kind(header_or_frame: Header | bytes | bytearray | memoryview) -> dict[str, dict[str, int]]:
    """Bytes of each of :data:`SITE_PARTS` for each kind of site of a frame."""
    header = header_or_frame
    if not isinstance(header, Header):
        header = open_frame(memoryview(header).cast("B"), "guidance frame")[0]
    out: dict[str, dict[str, int]] = {}
    # A frame holds the checks of a site's codes in the place of the codes.
    first = "code_checks" if Plan.recorded(header.plan).checked else "codes"
    for site in header.sites:
        line = out.setdefault(site.kind, dict.fromkeys(SITE_PARTS, 0))
        for part in ("codes", "block_scales", "global_scales", "checks"):
            section = getattr(site, part)
            line[first if part == "codes" else part] += section[1] if section is not None else 0
    return out


def _split(header: Header, length: int, total: int) -> dict[str, int]:
    out: dict[str, int] = dict.fromkeys(PARTS, 0)
    for line in by_kind(header).values():
        for part, size in line.items():
            out[part] += size
    out["routes"] = 0 if header.routes is None else header.routes.section[1]
    out["valid"] = header.valid[1]
    out["header"] = 64 + length
    out["alignment"] = total - sum(out.values())
    return out | {"total": total}
