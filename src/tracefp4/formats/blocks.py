"""Block quantization: the one implementation of every preset.

A tensor ``x (..., D)`` becomes codes ``(..., D)``, block scales ``(..., D / B)`` and, in NVFP4, a global scale. The
four steps are four functions, because guided rounding replaces some of them by what the rollout did::

    g = global_scale(x)            from the largest magnitude of a row or tensor
    s = block_scales(x, g)         from the largest magnitude of each block, a byte
    z = normalize(x, s, g)         x in units of its scale, clipped to [-6, 6]
    c = encode(z)                  the nearest code

All arithmetic is fp32 and elementwise; maxima are exact in any order. So the result of a row depends on that row alone
(scope ``token``), is bit-for-bit the same on CPU and CUDA, and never waits for the device. Two traps of eager PyTorch
are avoided: ``scalar / tensor`` computes ``reciprocal * scalar``, and on CUDA ``tensor / scalar`` multiplies by the
reciprocal. Every division here is between tensors, which is IEEE on both. ``torch.compile`` divides approximately
unless ``torch._inductor.config.eager_numerics.division_rounding`` is set; ``docs/numerics.md`` says what is exact then.

Non-finite values. An infinity counts as the largest finite float: its block gets the largest scale, it becomes +-6. A
NaN gives its block the NaN scale byte (E4M3 ``0x7F``, E8M0 ``0xFF``), so that block decodes to NaN and the step that
uses it fails loudly; it does not touch the global scale nor any other block. A block whose scale is zero has codes 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats import e2m1, e4m3, e8m0
from tracefp4.formats.fused import has_kernel, quantize_by_kernel
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.tables import lookup, on_device

FLT_MAX = torch.finfo(torch.float32).max
LARGEST_SCALE = 448.0
"""Block scale that the block of the largest value gets: the largest E4M3 number."""
_INT = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_MAX_EXPONENT = 126
"""Powers of two up to this one and their reciprocals are normal floats."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized tensor, unpacked.

    ``codes`` uint8 ``(..., D)``: E2M1 codes ``0..15``, or E4M3 bytes. ``scales`` uint8 ``(..., D / B)``.
    ``global_scale`` float32 in the numerics' primary form: ``(..., 1)`` for scope ``token``, broadcastable (``[]``, or
    ``(E, 1, 1)`` for stacked weights) for scope ``tensor``, ``None`` for ``constant`` and ``none``.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    numerics: Numerics

    def operand(self) -> Tensor:
        """``code x block scale`` in bfloat16 ``(..., D)``, exact: what enters a matrix multiplication."""
        return self._scaled(torch.bfloat16)

    def decode_scale(self) -> Tensor | None:
        """The FP32 global decode scale that multiplies the product; ``None`` stands for 1."""
        return _forms(self.global_scale, self.numerics, self.scales)[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``code x block scale x global scale`` ``(..., D)``, computed in fp32 and rounded once to ``dtype``."""
        scale = self.decode_scale()
        values = self._scaled(torch.float32)
        return (values if scale is None else values.mul_(scale)).to(dtype)

    def _scaled(self, dtype: torch.dtype) -> Tensor:
        n = self.numerics
        if n.element == "e4m3":
            values = _blocks(e4m3.decode(self.codes, dtype), n)
            return values.mul_(decode_scales(self.scales, n, dtype).unsqueeze(-1)).flatten(-2)
        index = self.codes.to(torch.int32)
        _blocks(index, n).bitwise_or_(self.scales.to(torch.int32).bitwise_left_shift_(4).unsqueeze(-1))
        return lookup(on_device(product_table, index.device, n.scale_format, dtype), index)


def product_table(scale_format: str, dtype: torch.dtype) -> Tensor:
    """Every ``code x block scale`` at index ``scale byte * 16 + code``, exact in ``dtype``; ``(4096,)``."""
    data = torch.arange(256, dtype=torch.uint8)
    scales = (e4m3 if scale_format == "e4m3" else e8m0).decode(data)
    codes = e2m1.decode(torch.arange(16, dtype=torch.uint8))
    return (scales[:, None] * codes).to(dtype).reshape(-1)


def quantize(x: Tensor, numerics: Numerics, global_scale: Tensor | None = None, *, per: int = 0) -> Quantized:
    """Round to nearest with scales made from ``x`` itself.

    Args:
        x: ``(..., D)`` bfloat16, float16 or float32.
        numerics: every arithmetic choice.
        global_scale: use this one (primary form) instead of making it from ``x``.
        per: for scope ``tensor``, how many leading axes have a global scale each.

    Raises:
        FormatError: wrong dtype, or ``D`` is no multiple of the block size.
    """
    if has_kernel(x, numerics) and (numerics.scope != "tensor" or x.numel()):
        return Quantized(*quantize_by_kernel(x.detach(), numerics, global_scale, per), numerics)
    amax = block_amax(x, numerics)
    if global_scale is None:
        global_scale = _global_from_amax(amax, numerics, per)
    scales = _scales_from_amax(amax, global_scale, numerics)
    codes = encode(normalize(x, scales, global_scale, numerics), numerics)
    return Quantized(clear_zero_blocks(codes, scales, numerics), scales, global_scale, numerics)


def quantize_weight(w: Tensor, numerics: Numerics) -> Quantized:
    """Quantize stacked expert weights ``(E, N, K)``, one global scale an expert: ``global_scale (E, 1, 1)``.

    Raises:
        FormatError: ``w`` is not three-dimensional, or as for :func:`quantize`.
    """
    if w.ndim != 3:
        raise FormatError(f"quantize_weight takes stacked weights (experts, out, in), got shape {tuple(w.shape)}.")
    return quantize(w, numerics, per=1)


def global_scale(x: Tensor, numerics: Numerics, *, per: int = 0, largest: float = LARGEST_SCALE) -> Tensor | None:
    """The global scale of ``x`` in primary form.

    Args:
        x: ``(..., D)``.
        numerics: scope ``token`` gives ``(..., 1)``; ``tensor`` gives ``[]``; ``constant`` and ``none`` give ``None``.
        per: for scope ``tensor``, how many leading axes have a global scale each; the others become axes of size 1.
        largest: block scale that the block of the largest value gets.
    """
    return _global_from_amax(block_amax(x, numerics), numerics, per, largest)


def block_scales(x: Tensor, global_scale: Tensor | None, numerics: Numerics, *, expand: float = 1.0) -> Tensor:
    """Scale bytes uint8 ``(..., D / B)`` of ``x (..., D)`` under a given global scale (primary form).

    E4M3 scales are multiplied by ``expand`` before they are rounded.
    """
    return _scales_from_amax(block_amax(x, numerics), global_scale, numerics, expand)


def normalize(x: Tensor, scales: Tensor, global_scale: Tensor | None, numerics: Numerics) -> Tensor:
    """``x`` in units of its scales, clipped to the largest element.

    Args:
        x: ``(..., D)``.
        scales: uint8 ``(..., D / B)``, of ``x`` or, under guidance, of the rollout.
        global_scale: primary form, broadcastable to ``(..., 1)``.
        numerics: the quotient rule.

    Returns:
        float32 ``(..., D)``. Where the block scale is 0 it is 0 (of either sign, NaN if ``x`` is not finite), computed
        without a division by zero; where the scale byte is NaN it is NaN.
    """
    x = _checked(x, numerics)
    s = decode_scales(scales, numerics)
    encode_scale, decode_scale = _forms(global_scale, numerics, s)
    if encode_scale is None or decode_scale is None:
        unit = s
    else:
        unit = torch.div(s, encode_scale) if numerics.quotient == "divide-ratio" else s * decode_scale
    # Finite values over infinity are 0, and one pass over scales is cheaper than one over values.
    unit = unit.masked_fill(scales == 0, torch.inf) if numerics.scale_format == "e4m3" else unit
    if numerics.quotient == "reciprocal":
        z = _blocks(x, numerics) * _inverse(unit).clamp_(max=FLT_MAX).unsqueeze(-1)
    else:
        z = _blocks(x, numerics) / unit.unsqueeze(-1)
    return z.clamp_(-numerics.element_max, numerics.element_max).flatten(-2)


def encode(z: Tensor, numerics: Numerics) -> Tensor:
    """Nearest code of each normalised value, uint8 in the shape of ``z``."""
    if numerics.element == "e4m3":
        return e4m3.encode(z)
    return e2m1.encode(z, numerics.ties, numerics.negative_zero)


def clear_zero_blocks(codes: Tensor, scales: Tensor, numerics: Numerics) -> Tensor:
    """Set the codes of blocks whose E4M3 scale is 0 to 0, in place: no negative zeros remain there.

    Args:
        codes: uint8 ``(..., D)``, contiguous.
        scales: uint8 ``(..., D / B)``.
        numerics: block size and scale format; E8M0 has no zero, so nothing happens.
    """
    if numerics.scale_format == "e4m3":
        # Eight codes at a time: the mask is all ones or all zeros.
        mask = (scales != 0).to(torch.int64).neg_().repeat_interleave(numerics.block // 8, dim=-1)
        codes.view(torch.int64).bitwise_and_(mask)
    return codes


def decode_scales(scales: Tensor, numerics: Numerics, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of scale bytes in ``dtype``."""
    return (e4m3 if numerics.scale_format == "e4m3" else e8m0).decode(scales, dtype)


def block_amax(x: Tensor, numerics: Numerics) -> Tensor:
    """Largest magnitude of each block, float32 ``(..., D / B)``; NaN if the block holds one.

    The bit patterns of non-negative floats are ordered like their values, with NaN on top, so the maximum is taken over
    integers.
    """
    x = _checked(x, numerics)
    kind = _INT[x.dtype]
    bits = _blocks(x.contiguous().view(kind).bitwise_and(torch.iinfo(kind).max), numerics)
    return bits.amax(-1).view(x.dtype).float()


def _checked(x: Tensor, numerics: Numerics) -> Tensor:
    """``x`` without its autograd history: rounding has no gradient, callers define one (straight-through)."""
    if x.dtype not in _INT:
        raise FormatError(f"Cannot quantize {x.dtype}; give bfloat16, float16 or float32.")
    if x.ndim == 0 or x.shape[-1] % numerics.block or x.shape[-1] == 0:
        raise FormatError(
            f"Last axis of shape {tuple(x.shape)} is no positive multiple of the block size {numerics.block} "
            f"of {numerics.name!r}."
        )
    return x.detach()


def _blocks(x: Tensor, numerics: Numerics) -> Tensor:
    return x.unflatten(-1, (-1, numerics.block))


def _fill(value: float, like: Tensor) -> Tensor:
    """A float32 scalar on the device of ``like``, without waiting for it."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _inverse(x: Tensor) -> Tensor:
    return torch.div(_fill(1.0, x), x)


def _forms(g: Tensor | None, numerics: Numerics, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """``(encode scale, decode scale)`` from the primary form; ``None`` stands for 1."""
    if numerics.scope == "constant" and g is None:
        if numerics.constant == 1.0:
            return None, None
        decode = _fill(numerics.constant, like)
        return _inverse(decode), decode
    if g is None:
        if numerics.scope != "none":
            raise FormatError(f"Numerics {numerics.name!r} needs a global scale of scope {numerics.scope!r}.")
        return None, None
    return (g, _inverse(g)) if numerics.global_form == "encode" else (_inverse(g), g)


def _global_from_amax(amax: Tensor, numerics: Numerics, per: int, largest: float = LARGEST_SCALE) -> Tensor | None:
    if numerics.scope in ("constant", "none"):
        return None
    if amax.numel() == 0 and numerics.scope == "tensor":
        raise FormatError(f"A tensor without values has no global scale (numerics {numerics.name!r}).")
    finite = amax.nan_to_num(nan=0.0, posinf=FLT_MAX)
    if numerics.scope == "token":
        top = finite.amax(-1, keepdim=True)
    else:
        axes = tuple(range(per, amax.ndim))
        top = finite.amax(axes, keepdim=per > 0)
    whole = _fill(largest * numerics.element_max, top)
    if numerics.global_rule == "pow2":
        return _power_of_two(top, whole, numerics)
    if numerics.global_form == "decode":
        scale = torch.div(top, whole)
    elif numerics.global_rule == "amax-rcp":
        scale = _inverse(top) * whole
    else:
        scale = torch.div(whole, top)
    return torch.where((top == 0) | (scale == 0), 1.0, scale.clamp_(max=FLT_MAX))


def _power_of_two(top: Tensor, whole: Tensor, numerics: Numerics) -> Tensor:
    """Largest power of two ``g`` with ``g * top <= whole``, read from the bits; its inverse in decode form."""
    mantissa, exponent = torch.frexp(top)
    whole_mantissa, whole_exponent = torch.frexp(whole)
    power = whole_exponent - exponent - (mantissa > whole_mantissa).to(torch.int32)
    power = torch.where(top == 0, 0, power).clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    if numerics.global_form == "decode":
        power = -power
    return (power + 127).bitwise_left_shift(23).view(torch.float32)


def _scales_from_amax(amax: Tensor, g: Tensor | None, numerics: Numerics, expand: float = 1.0) -> Tensor:
    if numerics.scale_format == "e8m0":
        return _e8m0_scales(amax, numerics)
    m = amax.clamp(max=FLT_MAX)
    encode_scale, decode_scale = _forms(g, numerics, m)
    top = _fill(numerics.element_max, m)
    rule = numerics.scale_rule
    if rule == "fold":
        factor = _inverse(top) if encode_scale is None else encode_scale * _inverse(top)
        value = m * factor
    elif rule == "divide":
        value = torch.div(m, top if decode_scale is None else top * decode_scale)
    else:
        value = torch.div(m, top) if rule == "block-first" else m * _inverse(top)
        value = value if encode_scale is None else value * encode_scale
    value = value if expand == 1.0 else value * expand
    data = e4m3.encode(value.clamp(min=numerics.scale_floor) if numerics.scale_floor else value)
    if numerics.zero_scale == 0.0 and numerics.scale_floor == 0.0:
        return data
    return data.masked_fill((amax == 0) | (data == 0), e4m3.byte(numerics.zero_scale))


def _e8m0_scales(amax: Tensor, numerics: Numerics) -> Tensor:
    power, top, half = (2, 0x400000, 0x600000) if numerics.element == "e2m1" else (8, 0x600000, 0x780000)
    data = e8m0.from_amax(amax, numerics.scale_rule, power, half if numerics.scale_rule == "half" else top)
    if numerics.scale_floor:
        data = data.clamp_(min=e8m0.byte(numerics.scale_floor))
    return data.masked_fill(amax == 0, e8m0.byte(numerics.zero_scale))
