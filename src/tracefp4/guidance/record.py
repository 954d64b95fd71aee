"""The guidance of one rollout in memory: for every site of a plan the recorded outcomes, one row a forwarded token.

A record says what it is about, so that nobody has to trust the place where it was found: the plan, the numerics, the
weight version, a hash of all tokens, and which rows are valid. A row that is not valid was not recorded (a prefix that
came from a cache, a resumed sequence); its bytes mean nothing and nobody reads them. Everything stays packed until a
site asks for its :class:`~tracefp4.quantizers.guided.Outcome`.

Under a *checked* plan a record has no bits of codes, only a check of those of each row, and a call that pulls the bits
of some rows from whoever kept them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from tracefp4.core import Site, SiteShape
from tracefp4.errors import GuidanceError, GuidanceMismatch
from tracefp4.guidance.codec import (
    CHECK_BYTES,
    CHUNK,
    code_checks,
    pack_bits,
    pack_scales,
    scale_bytes,
    scale_checks,
    unpack_bits,
    unpack_scales,
)
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.store import Source
from tracefp4.quantizers.guided import Outcome


@dataclass(slots=True)
class SiteRecord:
    """Recorded outcomes of one site, packed as :mod:`tracefp4.guidance.codec` describes. ``T`` rows.

    All tensors lie on one device. Those of a decoded frame share its memory: read them, never write to them.
    """

    shape: SiteShape
    planes: Tensor
    """uint8 ``(T, vectors, bits * width / 8)``; without bits where there are :attr:`code_checks`, until a trainer has
    found them (:mod:`tracefp4.training.pulls`)."""
    scales: Tensor
    """uint8 ``(T, vectors, scale_bytes(width / block, scale_bits))``."""
    global_scale: Tensor | None
    """float32 ``(T, vectors)``; ``None`` unless ``shape.token_scale``."""
    checks: Tensor | None = None
    """int32 ``(ceil(T / 16),)`` over the whole scale bytes when they are congruent, else ``None``."""
    scale_bits: int = 8
    code_checks: Tensor | None = None
    """int32 ``(T,)`` over the planes of each row under a checked plan, else ``None``."""

    @classmethod
    def pack(
        cls,
        shape: SiteShape,
        codes: Tensor,
        scales: Tensor,
        global_scale: Tensor | None,
        bits: int,
        scale_bits: int = 8,
        valid: Tensor | None = None,
    ) -> SiteRecord:
        """Pack what a quantizer produced.

        Args:
            shape: of the site.
            codes: uint8 ``(T, vectors, width)``, whole codes.
            scales: uint8 ``(T, vectors, width / block)``, whole bytes.
            global_scale: float32 ``(T, vectors)`` if ``shape.token_scale``, else ``None``.
            bits: low bits of each code to keep.
            scale_bits: 8, 3 or 2.
            valid: bool ``(T,)``, for the checks of congruent scales; ``None``: every row.
        """
        checks = None if scale_bits == 8 else scale_checks(scales.flatten(1), valid)
        return cls(shape, pack_bits(codes, bits), pack_scales(scales, scale_bits), global_scale, checks, scale_bits)

    @property
    def bits(self) -> int:
        """Kept bits of each code."""
        return self.planes.shape[-1] * 8 // self.shape.width

    @property
    def rows(self) -> int:
        """Rows, ``T``."""
        return self.planes.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors."""
        return sum(t.nbytes for t in self._tensors().values() if t is not None)

    def outcome(self, rows: Tensor | None = None) -> Outcome:
        """Unpack for guided rounding.

        Args:
            rows: int64 ``(R,)``, ``row * vectors + vector`` of each wanted vector; ``None`` for all, row-major.

        Returns:
            an outcome with ``low (R, width)``, or ``(R, 0)`` without bits; ``scales (R, width / block)`` and
            ``global_scale (R, 1)`` or ``None``.
        """
        planes, scales = self.planes.flatten(0, 1), self.scales.flatten(0, 1)
        global_scale = None if self.global_scale is None else self.global_scale.reshape(-1, 1)
        if rows is not None:
            planes, scales = planes[rows], scales[rows]
            global_scale = None if global_scale is None else global_scale[rows]
        width, blocks = self.shape.width, self.shape.width // self.shape.block
        low = unpack_bits(planes, self.bits, width) if self.bits else planes
        return Outcome(low, unpack_scales(scales, self.scale_bits, blocks), global_scale, self.bits, self.scale_bits)

    def slice(self, start: int, stop: int, *, checks: bool = True) -> SiteRecord:
        """Rows ``start`` to ``stop - 1``, without copying.

        Args:
            start: first row.
            stop: one past the last row.
            checks: keep the scale checks. They need whole chunks: ``start`` a multiple of 16, ``stop`` one or the end.

        Raises:
            GuidanceError: the range is not within the record, or cuts a chunk of the checks.
        """
        _check_range(start, stop, self.rows)
        kept = None
        if self.checks is not None and checks:
            if start % CHUNK or (stop % CHUNK and stop != self.rows):
                raise GuidanceError(
                    f"site {self.shape.site}: rows {start} to {stop} cut a chunk of {CHUNK} checked rows; "
                    f"take {start - start % CHUNK} to {min(stop + -stop % CHUNK, self.rows)}, or checks=False"
                )
            kept = self.checks[start // CHUNK : -(-stop // CHUNK)]
        scale = None if self.global_scale is None else self.global_scale[start:stop]
        planes, scales = self.planes[start:stop], self.scales[start:stop]
        codes = None if self.code_checks is None else self.code_checks[start:stop]
        return replace(self, planes=planes, scales=scales, global_scale=scale, checks=kept, code_checks=codes)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SiteRecord:
        """The same record on another device."""
        moved = {k: None if t is None else t.to(device, non_blocking=non_blocking) for k, t in self._tensors().items()}
        return replace(self, **moved)

    def misses(self, scales: Tensor, valid: Tensor | None = None) -> Tensor:
        """Which chunks of 16 rows hold a scale that was not restored to the rollout's byte.

        Args:
            scales: uint8 ``(T, vectors, width / block)``, the whole bytes that the trainer restored.
            valid: bool ``(T,)``, the record's.

        Returns:
            bool ``(ceil(T / 16),)`` on the device of ``scales``. A wrong chunk passes with a probability below 2^-30.

        Raises:
            GuidanceError: the record has no checks (its scales are whole), or the shape does not fit.
        """
        if self.checks is None:
            raise GuidanceError(f"site {self.shape.site} has no checks: its scales travelled whole")
        shape = (self.rows, self.shape.vectors, self.shape.width // self.shape.block)
        if tuple(scales.shape) != shape:
            raise GuidanceError(f"site {self.shape.site} has scales {shape}, got {tuple(scales.shape)}")
        return scale_checks(scales.flatten(1), valid) != self.checks

    def reduce(self, bits: int, scale_bits: int, valid: Tensor | None = None, *, checked: bool = False) -> SiteRecord:
        """What a smaller plan would have recorded: fewer bits a code, or congruent scales instead of whole ones.

        With ``checked`` there are no bits, but checks of them.

        Raises:
            GuidanceError: more was asked for than is there.
        """
        if bits > self.bits or scale_bits > self.scale_bits:
            raise GuidanceError(
                f"site {self.shape.site} has {self.bits} bits a code and {self.scale_bits} a scale; "
                f"{bits} and {scale_bits} cannot be made of them"
            )
        planes, codes = self.planes[..., : bits * self.shape.width // 8], None
        if checked:
            codes, planes = code_checks(planes.flatten(1), valid), planes[..., :0]
        if scale_bits == self.scale_bits:
            return replace(self, planes=planes, code_checks=codes)
        whole = unpack_scales(self.scales, self.scale_bits, self.shape.width // self.shape.block)
        # Checks cover whole bytes: those made of an 8-bit record are computed here, those of a 3-bit one already are.
        checks = scale_checks(whole.flatten(1), valid) if self.scale_bits == 8 else self.checks
        scales = pack_scales(whole, scale_bits)
        return SiteRecord(self.shape, planes, scales, self.global_scale, checks, scale_bits, codes)

    def _tensors(self) -> dict[str, Tensor | None]:
        names = ("planes", "scales", "global_scale", "checks", "code_checks")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class Record:
    """The guidance of one rollout of ``rows + 1`` tokens."""

    plan: str
    """Name of the :class:`~tracefp4.guidance.plan.Plan`."""
    token_hash: str
    """:func:`token_hash` of prompt and response."""
    numerics_hash: str
    """Hash of every arithmetic choice at the sites (:attr:`tracefp4.formats.spec.Spec.hash`)."""
    weight_version: int
    """Weights that produced it, at the start of the rollout."""
    rows: int
    """Tokens minus one: the last sampled token is never forwarded."""
    valid: Tensor
    """bool ``(rows,)``: the row was recorded."""
    sites: Mapping[Site, SiteRecord]
    routes: Tensor | None = None
    """uint8 or int16 ``(rows, moe_layers, top_k)``: expert ids of the rollout."""
    source: Source | None = None
    """Who has the bits that a checked plan left with the engine."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors, without any header."""
        extra = self.valid.nbytes + (0 if self.routes is None else self.routes.nbytes)
        return extra + sum(site.nbytes for site in self.sites.values())

    @property
    def coverage(self) -> float:
        """Share of rows that are valid (1 for a record without rows)."""
        return float(self.valid.float().mean()) if self.rows else 1.0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Record:
        """The same record on another device."""
        sites = {site: r.to(device, non_blocking=non_blocking) for site, r in self.sites.items()}
        routes = None if self.routes is None else self.routes.to(device, non_blocking=non_blocking)
        return replace(self, valid=self.valid.to(device, non_blocking=non_blocking), sites=sites, routes=routes)


def restrict(record: Record, plan: Plan, shapes: Sequence[SiteShape], num_layers: int) -> Record:
    """Cut a record down to a smaller plan: what the engine would have recorded under it.

    Bits that a checked plan leaves out are pulled from ``record``.

    Args:
        record: recorded with more bits, more sites, or whole scales.
        plan: the smaller plan.
        shapes: all site shapes of the model.
        num_layers: decoder layers of the model.

    Raises:
        GuidanceError: the record lacks a site or bits that the plan asks for.
    """
    sites: dict[Site, SiteRecord] = {}
    for shape in plan.select(shapes, num_layers):
        if shape.site not in record.sites:
            raise GuidanceError(f"plan {str(plan)!r} needs site {shape.site}, a record of {record.plan!r} lacks it")
        if record.sites[shape.site].shape != shape:
            raise GuidanceMismatch(f"the record has {record.sites[shape.site].shape}, the model {shape}")
        part = record.sites[shape.site]
        sites[shape.site] = part.reduce(plan.bits, plan.scale_bits, record.valid, checked=plan.checked)

    def pull(site: Site, wanted: Sequence[tuple[object, np.ndarray]]) -> list[np.ndarray]:
        part = record.sites[site]
        planes = part.planes[..., : plan.bits * part.shape.width // 8]
        return [planes[torch.from_numpy(rows).to(planes.device)].cpu().numpy() for _, rows in wanted]

    return replace(record, plan=str(plan), sites=sites, source=Source(pull, None) if plan.checked else None)


def token_hash(tokens: Sequence[int] | np.ndarray | Tensor) -> str:
    """XXH3-128 of the token ids as little-endian int32, 32 hex characters.

    Raises:
        GuidanceError: an id is negative or does not fit into int32.
    """
    ids = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise GuidanceError(f"token ids are a flat sequence of integers, got {ids.dtype} of shape {ids.shape}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise GuidanceError(f"token ids lie in 0..2^31-1, got {int(ids.min())} to {int(ids.max())}")
    return xxhash.xxh3_128_hexdigest(ids.astype("<i4").tobytes())


def record_bytes(shape: SiteShape, bits: int, scale_bits: int, checked: bool = False) -> dict[str, int]:
    """Bytes of one row of a site: ``codes`` or their check, ``block_scales``, ``global_scales``.

    Checks of scales come once in 16 rows.
    """
    return {
        "codes": CHECK_BYTES if checked else shape.values * bits // 8,
        "block_scales": shape.vectors * scale_bytes(shape.width // shape.block, scale_bits),
        "global_scales": 4 * shape.vectors if shape.token_scale else 0,
    }


def _check_range(start: int, stop: int, rows: int) -> None:
    if not 0 <= start <= stop <= rows:
        raise GuidanceError(f"rows {start} to {stop} are not within the {rows} rows of the record")
