"""Expert weights as the grouped kernel reads them, made from packed weights.

The canonical form of a quantized weight is :class:`~tracefp4.models.packing.PackedWeight`, whose bytes the checksum
covers. For a GPU without FP4 tensor cores its codes are arranged in words once, when it is synced
(:mod:`tracefp4.formats.words`); nothing is rounded again. Codes can be taken out of the words again, so an engine keeps
the words and a little aside: :func:`packed_again` gives the packed bytes back whenever the checksum is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats import words
from tracefp4.formats.blocks import Quantized
from tracefp4.formats.numerics import Numerics
from tracefp4.models.packing import PackedWeight

if TYPE_CHECKING:
    from tracefp4.kernels.experts import ExpertWeight


_GROUP = 1 << 24
"""Values that are arranged at a time. All experts of a small model take one pass, where a launch costs more than the
work; those of a large one take several, so that temporaries, up to 5 bytes a value, stay below 100 MB."""


def arrange(packed: PackedWeight, into: ExpertWeight | None = None) -> ExpertWeight | None:
    """The weight in words, or ``None`` where the kernel cannot take it. Waits for the device if scales are E8M0.

    It takes matrices with ``in`` a multiple of 64, with E4M3 scales of 16 values or E8M0 scales of 32.

    Args:
        packed: the weight.
        into: an arranged weight of the same shape and numerics, whose memory is written again and returned.

    Raises:
        FormatError: see :func:`refuse_inexact`.
    """
    arranged, exact = _arrange(packed, into)
    refuse_inexact({str(tuple(packed.codes.shape[:2])): exact})
    return arranged


def _arrange(packed: PackedWeight, into: ExpertWeight | None) -> tuple[ExpertWeight | None, Tensor | None]:
    """The weight in words, and for :func:`refuse_inexact` whether the scales of its experts allow that."""
    from tracefp4.kernels.experts import ExpertWeight

    numerics = packed.numerics
    experts, out, inner = packed.codes.shape[0], packed.codes.shape[1], packed.codes.shape[2] * 2
    mx = numerics.scale_format == "e8m0"
    if inner % words.CHUNK or numerics.block != (32 if mx else 16):
        return None, None
    exact = None
    if mx:
        scales, alpha, exact = _lifted(packed)
    else:
        scales = words.recode(packed.scales)
        alpha = Quantized(packed.codes, packed.scales, packed.global_scale, numerics).decode_scale()
    scales = scales.view(experts, out, inner // 64, -1).transpose(1, 2)
    alpha = None if alpha is None else alpha.reshape(-1)
    if into is None:
        values = packed.codes.new_empty(experts, inner // 64, out, 32).view(torch.int16)
        into = ExpertWeight(values, scales.contiguous(), alpha, out, inner, mx, numerics.block)
    else:
        for old, new in ((into.scales, scales), (into.alpha, alpha)):
            if old is not None and new is not None:
                old.copy_(new)
    for group in _groups(experts, out * inner):
        rows = words.of_packed(packed.codes[group])
        into.values[group] = rows.unflatten(-1, (-1, 16)).transpose(1, 2)
    return into, exact


def _groups(experts: int, values: int) -> Iterator[slice]:
    """Runs of experts of ``values`` each that are small enough to be taken at once."""
    step = max(1, _GROUP // max(values, 1))
    return (slice(first, first + step) for first in range(0, experts, step))


def refuse_inexact(exact: Mapping[str, Tensor | None]) -> None:
    """Refuse weights that the grouped product cannot multiply exactly. Waits for the device once.

    Args:
        exact: by what the message calls a weight, bool ``(E,)``: the E8M0 scales of an expert are near enough to each
            other; ``None`` for other scales.

    Raises:
        FormatError: E8M0 scales that are NaN or too far apart.
    """
    known = {name: fits for name, fits in exact.items() if fits is not None}
    if not known or bool(torch.cat(list(known.values())).all()):
        return
    name, wrong = next((name, (~fits).nonzero().flatten()) for name, fits in known.items() if not fits.all())
    raise FormatError(
        f"expert {int(wrong[0])} of a weight {name} has MXFP4 scales that are NaN or more than "
        "133 octaves apart, which the grouped product cannot multiply exactly; TRACEFP4_KERNELS=reference can."
    )


def _lifted(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Lifted E8M0 scales in the shape of the packed ones, and ``(E,)`` each: factors, and whether they are exact."""
    half = packed.numerics.block // 2
    experts, out, width = packed.codes.shape
    found = []
    for group in _groups(experts, 2 * out * width):
        used = ((packed.codes[group].unflatten(-1, (-1, half)) & 0x77) != 0).any(-1)
        found.append(words.lift(packed.scales[group], used))
    scales, factors, exact = (torch.cat(parts) if len(found) > 1 else parts[0] for parts in zip(*found, strict=True))
    return scales, factors, exact


class Aside(NamedTuple):
    """What an arranged weight does not hold of the packed one."""

    scales: Tensor | None
    """E8M0 scales, whose lifting cannot be undone; ``None`` for others."""
    global_scale: Tensor | None
    """``(E, 1, 1)`` float32 in primary form; a kernel has the decode form only."""


def set_aside(packed: PackedWeight) -> Aside:
    """What has to be kept beside ``arrange(packed)``."""
    return Aside(packed.scales if packed.numerics.scale_format == "e8m0" else None, packed.global_scale)


def put_aside(asides: dict[str, Aside], name: str, packed: PackedWeight) -> None:
    """:func:`set_aside` under ``name``, in the memory of its predecessor."""
    new, old = set_aside(packed), asides.get(name)
    if old is None:
        asides[name] = new
        return
    for target, source in zip(old, new, strict=True):
        if target is not None and source is not None:
            target.copy_(source)


def packed_again(weight: ExpertWeight, aside: Aside, numerics: Numerics) -> PackedWeight:
    """The packed weight from which :func:`arrange` made ``weight``, bit for bit.

    Args:
        weight: words and recoded or lifted scales.
        aside: what :func:`set_aside` took from the packed weight.
        numerics: of the weight.

    Raises:
        FormatError: ``weight`` is a plain bfloat16 one.
    """
    if weight.scales is None:
        raise FormatError("a bfloat16 weight has no packed form; quantize it first")
    experts = len(weight.values)
    codes = torch.empty(experts, weight.out, weight.inner // 2, dtype=torch.uint8, device=weight.values.device)
    for group in _groups(experts, weight.out * weight.inner):
        codes[group] = words.to_packed(weight.values[group].transpose(1, 2).flatten(2))
    # In memory of its own: what is set aside is written again by the next sync.
    scales, global_scale = (None if part is None else part.clone() for part in aside)
    if scales is None:
        scales = words.restore(weight.scales.transpose(1, 2).reshape(experts, weight.out, -1))
    return PackedWeight(codes, scales, global_scale, numerics)


def put_arranged(
    weights: dict[tuple[int, str], ExpertWeight], key: tuple[int, str], packed: PackedWeight
) -> Tensor | None:
    """Arrange ``packed`` and keep it under ``key``, in the memory of its predecessor: captured graphs read there.

    Returns:
        What :func:`refuse_inexact` is to be asked.
    """
    arranged, exact = _arrange(packed, weights.get(key))
    if arranged is not None:
        weights[key] = arranged
    return exact


def put_plain(weights: dict[tuple[int, str], ExpertWeight], key: tuple[int, str], weight: Tensor) -> None:
    """Let the kernel read an unquantized bfloat16 weight ``(E, out, in)`` where it lies."""
    from tracefp4.kernels.experts import ExpertWeight

    if weight.is_contiguous() and weight.shape[2] % words.CHUNK == 0:
        weights[key] = ExpertWeight(weight, None, None, weight.shape[1], weight.shape[2])
