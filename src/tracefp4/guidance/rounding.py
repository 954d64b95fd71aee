"""A site's rounding in one pass: what a matrix product takes and what guidance keeps, without codes in between.

``formats`` and ``quantizers`` answer with codes, which is what one wants to look at. A running engine wants the exact
operand and the low bits of the codes as planes; a running trainer wants the operand of a rounding that follows recorded
planes. Where there is a kernel both are written directly. Elsewhere they are put together from the plain functions,
which define the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tracefp4.errors import GuidanceError
from tracefp4.formats.blocks import Quantized
from tracefp4.formats.fused import has_kernel, rules
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.packed import Packed
from tracefp4.guidance.codec import pack_bits
from tracefp4.guidance.record import SiteRecord
from tracefp4.kernels.place import Place
from tracefp4.quantizers.guided import nearest_codes
from tracefp4.quantizers.nearest import quantize_nearest
from tracefp4.quantizers.residual import channels, terms


@dataclass(slots=True)
class Rounding:
    """A rounded tensor ``(R, D)``."""

    operand: Tensor | None
    """bfloat16 ``(R, D)``: ``code x block scale``, exact."""
    values: Tensor | None
    """``(R, D)``: dequantized, rounded once."""
    planes: Tensor | None
    """uint8 ``(R, bits D / 8)``; ``None`` where none were wanted, or they were written where they are kept."""
    scales: Tensor
    """uint8 ``(R, D / B)``."""
    global_scale: Tensor | None
    """float32 ``(R, 1)`` in primary form."""
    numerics: Numerics
    decode: Tensor | None = None
    """float32 ``(R, 1)``: what :meth:`decode_scale` returns, where a kernel has written it already."""
    packed: Packed | None = None
    """Codes and block scales, for a backward pass."""
    second: Tensor | None = None
    """bfloat16 ``(R, D)``, exact: what the operand missed, rounded with the same global scale."""

    @classmethod
    def of(cls, q: Quantized, bits: int, operand: Tensor | None) -> Rounding:
        """What :func:`round_nearest` returns, of codes that were made already and an operand that stands for them."""
        return cls(operand, None, pack_bits(q.codes, bits) if bits else None, q.scales, q.global_scale, q.numerics)

    def factor(self) -> Tensor:
        """The operand.

        Raises:
            GuidanceError: the tensor was rounded for its dequantized values alone.
        """
        if self.operand is None:
            raise GuidanceError("a tensor was rounded without the operand that its product needs")
        return self.operand

    def decode_scale(self) -> Tensor | None:
        """The FP32 global decode scale that multiplies the product; ``None`` stands for 1."""
        if self.decode is not None:
            return self.decode
        return Quantized(self.scales, self.scales, self.global_scale, self.numerics).decode_scale()


def round_nearest(
    x: Tensor,
    numerics: Numerics,
    bits: int = 0,
    *,
    pack: bool = False,
    values: torch.dtype | None = None,
    place: Place | None = None,
) -> Rounding:
    """Quantize ``x (R, D)`` to nearest, for a product, keeping ``bits`` low bits of each code (0: none).

    With ``pack`` the codes are returned too, two a byte. With ``values`` dequantized values in that dtype stand in the
    place of operands. A kernel writes what is kept to ``place`` if there is one, and returns no planes then.
    """
    if has_kernel(x, numerics):
        from tracefp4.kernels.quantize import quantize

        out = quantize(
            x.detach(), rules(numerics), operand=values is None, values=values, packed=pack, bits=bits, decode=True,
            place=place,
        )  # fmt: skip
        packed = None if out.packed is None else Packed(out.packed, out.scales, numerics)
        return Rounding(out.operand, out.values, out.planes, out.scales, out.global_scale, numerics, out.decode, packed)
    q = quantize_nearest(x, numerics)
    found = Rounding.of(q, bits, q.operand() if values is None else None)
    found.values = None if values is None else q.dequantize(values)
    found.packed = Packed.of(q) if pack else None
    return found


def round_gated(
    x: Tensor, numerics: Numerics, bits: int = 0, *, pack: bool = False, place: Place | None = None
) -> Rounding | None:
    """:func:`round_nearest` of ``silu(gate) * up`` for ``x (R, 2 D)``, gate before up, in the same pass.

    ``None`` where there is no kernel for it. The gate is rounded as the eager code rounds it, so codes are the same.
    """
    if not has_kernel(x, numerics, gated=True):
        return None
    from tracefp4.kernels.quantize import quantize

    out = quantize(
        x.detach(), rules(numerics), gated=True, operand=True, packed=pack, bits=bits, decode=True, place=place
    )
    packed = None if out.packed is None else Packed(out.packed, out.scales, numerics)
    return Rounding(out.operand, None, out.planes, out.scales, out.global_scale, numerics, out.decode, packed)


def round_normed(
    x: Tensor,
    added: Tensor,
    weight: Tensor,
    eps: float,
    numerics: Numerics,
    bits: int = 0,
    *,
    offset: bool = False,
    place: Place | None = None,
) -> tuple[Tensor, Tensor, Rounding] | None:
    """``x + added``, its norm, and :func:`round_nearest` of that; ``None`` where there is no kernel for it.

    Arguments are those of :func:`tracefp4.kernels.enter.enter`, which has the formulas.
    """
    if not has_kernel(x, numerics):
        return None
    from tracefp4.kernels import enter

    if not enter.fits(x, added, weight):
        return None
    hidden, normed, out = enter.enter(x, added, weight, eps, rules(numerics), bits, offset=offset, place=place)
    rounding = Rounding(out.operand, None, out.planes, out.scales, out.global_scale, numerics, out.decode)
    return hidden, normed, rounding


def round_compensated(
    x: Tensor, numerics: Numerics, share: float, bits: int = 0, *, place: Place | None = None
) -> Rounding:
    """:func:`round_nearest` with a second term for a share of each row's channels.

    See :func:`tracefp4.quantizers.residual.terms`, which defines both and raises its errors.
    """
    found = _compensated_by_kernel(x, numerics, share, bits, place, gated=False)
    if found is None:
        q = quantize_nearest(x, numerics)
        first, second = terms(x, q, share)
        found = Rounding.of(q, bits, first)
        found.second = second
    return found


def round_gated_compensated(
    x: Tensor, numerics: Numerics, share: float, bits: int = 0, *, place: Place | None = None
) -> Rounding | None:
    """:func:`round_compensated` of ``silu(gate) * up``, as :func:`round_gated` has it."""
    return _compensated_by_kernel(x, numerics, share, bits, place, gated=True)


def _compensated_by_kernel(
    x: Tensor, numerics: Numerics, share: float, bits: int, place: Place | None, *, gated: bool
) -> Rounding | None:
    if not has_kernel(x, numerics, gated):
        return None
    from tracefp4.kernels import residual

    if not residual.fits(x, rules(numerics), gated):
        return None
    count = channels(share, x.shape[-1] // 2 if gated else x.shape[-1])
    out, second = residual.compensate(x.detach(), rules(numerics), count, gated=gated, bits=bits, place=place)
    return Rounding(
        out.operand, None, out.planes, out.scales, out.global_scale, numerics, out.decode, second=second
    )  # fmt: skip


def round_recorded(
    x: Tensor,
    record: SiteRecord,
    numerics: Numerics,
    rows: Tensor | None,
    valid: Tensor | None,
    values: torch.dtype | None = None,
    *,
    pack: bool = False,
    gated: bool = False,
) -> Rounding | None:
    """Round ``x (R, D)`` as recorded outcomes say (decoder ``bracket``), or ``None`` where there is no kernel for it.

    Args:
        x: the trainer's values.
        record: the site's outcomes, on the device of ``x``.
        numerics: the site's numerics.
        rows: index of each vector of ``x`` among the recorded ones; ``None`` if they are in order.
        valid: bool, one for each token row: it has guidance. ``None``: all have.
        values: return dequantized values in this dtype instead of operands.
        pack: return the codes too, two a byte.
        gated: ``x (R, 2 D)`` holds gate and up, and ``silu(gate) * up`` is rounded.
    """
    if not _guided_kernel(x, record, numerics, gated):
        return None
    from tracefp4.kernels import guided

    out = guided.quantize_guided(
        x.detach(), rules(numerics), record.planes.flatten(0, 1).contiguous(), record.scales.flatten(0, 1).contiguous(),
        None if record.global_scale is None else record.global_scale.contiguous(),
        bits=record.bits, scale_bits=record.scale_bits, rows=rows, valid=valid,
        vectors=record.shape.vectors, gated=gated,
        operand=values is None, values=values, packed=pack,
    )  # fmt: skip
    packed = None if out.packed is None else Packed(out.packed, out.scales, numerics)
    return Rounding(out.operand, out.values, None, out.scales, out.global_scale, numerics, out.decode, packed)


def nearest_planes(x: Tensor, record: SiteRecord, numerics: Numerics, rows: Tensor | None, bits: int) -> Tensor:
    """Low bits of the codes of ``x (R, D)`` rounded to nearest at recorded scales; no recorded bit counts.

    Args:
        x: the trainer's values.
        record: the site's outcomes, on the device of ``x``.
        numerics: the site's numerics.
        rows: index of each vector of ``x`` among the recorded ones; ``None`` if they are in order.
        bits: kept of each code.

    Returns:
        uint8 ``(R, bits * D / 8)``.
    """
    if not _guided_kernel(x, record, numerics):
        return pack_bits(nearest_codes(x, record.outcome(rows), numerics), bits)
    from tracefp4.kernels import guided

    scales = record.scales.flatten(0, 1).contiguous()
    out = guided.quantize_guided(
        x.detach(), rules(numerics), scales, scales,
        None if record.global_scale is None else record.global_scale.contiguous(),
        bits=0, scale_bits=record.scale_bits, rows=rows, vectors=record.shape.vectors, kept=bits,
    )  # fmt: skip
    return cast(Tensor, out.planes)


def _guided_kernel(x: Tensor, record: SiteRecord, numerics: Numerics, gated: bool = False) -> bool:
    """Whether a kernel rounds ``x`` as ``record`` says."""
    if (
        x.ndim != 2
        or not has_kernel(x, numerics, gated)
        or (numerics.scope == "token") != (record.global_scale is not None)
    ):
        return False
    from tracefp4.kernels import guided

    return guided.fits(x, rules(numerics), gated)
