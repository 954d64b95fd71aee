"""A spec says how a model is deployed: which numerics its weights, activations and KV cache have.

One base numerics (``nvfp4-te`` by default) fixes the arithmetic; the three uses differ only in what shares a global
scale:

``weights``      one per expert tensor, known long before use; gate and up share it because they are one tensor
``activations``  one per row, computed on the fly, so that a token's result does not depend on its batch
``kv``           a constant of the layer: a reduction over heads or tokens would tie cache entries to each other

A suffix leaves the first decoder layers in bfloat16, weights, activations and KV alike: under ``nvfp4-w4a4-kv4/b2``
layers 0 and 1. What is rounded there moves every layer behind it, and they have no roundings that a record could be
about; the price is memory (:mod:`tracefp4.models.footprint`).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import cached_property

from tracefp4.core import KV_KINDS, Kind, Site
from tracefp4.errors import FormatError, suggest
from tracefp4.formats.numerics import Numerics, Scope, get_numerics

DEFAULT_NVFP4 = "nvfp4-te"
DEFAULT_MXFP4 = "mxfp4-ceil"

_SPECS = {
    # name: (weights, activations, kv)
    "nvfp4-w4a4-kv4": ("nvfp4", "nvfp4", "nvfp4"),
    "nvfp4-w4a4": ("nvfp4", "nvfp4", None),
    "nvfp4-kv4": (None, None, "nvfp4"),
    "nvfp4-w4a16": ("nvfp4", None, None),
    "nvfp4-w4a16-kv4": ("nvfp4", None, "nvfp4"),
    "mxfp4-w4a8-kv4": ("mxfp4", "mxfp8", "mxfp4"),
    "mxfp4-w4a4-kv4": ("mxfp4", "mxfp4", "mxfp4"),
    "mxfp4-w4a16": ("mxfp4", None, None),
    "mxfp4-w4a16-kv4": ("mxfp4", None, "mxfp4"),
    "bf16": (None, None, None),
}

SPECS = tuple(_SPECS)
"""Names of all specs, without a suffix."""

_NAME = re.compile(r"(.*?)(?:/b(0|[1-9][0-9]{0,3}))?", re.DOTALL)


@dataclass(frozen=True)
class Spec:
    """How a model is deployed. ``None`` leaves a tensor in bfloat16."""

    name: str
    weights: Numerics | None
    activations: Numerics | None
    kv: Numerics | None
    bf16_layers: int = 0
    """First decoder layers in which everything is left in bfloat16."""

    @cached_property
    def hash(self) -> str:
        """Sixteen hex characters over the name, the hashes of the three numerics, and the layers left out, if any."""
        parts = [self.name, *(n.hash if n else "-" for n in (self.weights, self.activations, self.kv))]
        parts += [f"b{self.bf16_layers}"] if self.bf16_layers else []
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).hexdigest()

    def for_kind(self, kind: Kind) -> Numerics | None:
        """Numerics of a site: ``kv`` for K, V and the latent, ``activations`` for the experts' inputs.

        Those of the layers that are quantized; see :meth:`for_site`.
        """
        return self.kv if kind in KV_KINDS else self.activations

    def for_site(self, site: Site) -> Numerics | None:
        """Numerics of a site in its layer."""
        return self.for_kind(site.kind) if self.quantizes(site.layer) else None

    def weights_of(self, layer: int) -> Numerics | None:
        """Numerics of the expert weights in a layer."""
        return self.weights if self.quantizes(layer) else None

    def quantizes(self, layer: int) -> bool:
        """Whether a decoder layer is quantized as the spec says, or left in bfloat16."""
        return layer >= self.bf16_layers


def names_bf16_layers(name: str) -> bool:
    """Whether a spec's name says how many first layers are left in bfloat16; ``/b0`` says none."""
    return _parts(name)[1] is not None


def with_bf16_layers(name: str, layers: int) -> str:
    """The name of the same spec with so many first layers in bfloat16."""
    return _parts(name)[0] + (f"/b{layers}" if layers else "")


def _parts(name: str) -> tuple[str, str | None]:
    """A spec's name without its suffix, and the number in the suffix."""
    match = _NAME.fullmatch(name)
    return (name, None) if match is None else (match[1], match[2])


def get_spec(name: str, numerics: str = DEFAULT_NVFP4, *, kv: str | None = None) -> Spec:
    """The spec ``name``, computed with the arithmetic of a preset.

    Args:
        name: one of :data:`SPECS`, with ``/bN`` for ``N`` first decoder layers in bfloat16.
        numerics: preset that the FP4 tensors follow. An MXFP4 spec takes an ``mxfp4`` preset; the default names an
            NVFP4 formula and means ``mxfp4-ceil`` there.
        kv: another preset for the KV cache, such as ``sglang-kv-mx``.

    Raises:
        FormatError: unknown spec or preset, a preset of another format, or layers left out of a spec without formats.
    """
    given, (name, number) = name, _parts(name)
    if name not in _SPECS:
        raise FormatError(f"Unknown spec {given!r}{suggest(name, SPECS)}.")
    weights, activations, cache = _SPECS[name]
    layers = int(number or 0)
    if layers and not (weights or activations or cache):
        raise FormatError(f"Spec {given!r} leaves every layer in bfloat16; its name is {name!r}.")
    base = _base(name, weights or cache, numerics)
    uses = {"nvfp4": base, "mxfp4": base, "mxfp8": get_numerics("mxfp8"), None: None}
    cached = get_numerics(kv) if kv and cache else uses[cache]
    return Spec(
        with_bf16_layers(name, layers),
        weights=_scoped(uses[weights], "tensor", "weight"),
        activations=_scoped(uses[activations], "token", "activation"),
        kv=_scoped(cached, "constant", "kv"),
        bf16_layers=layers,
    )


def _base(spec: str, family: str | None, numerics: str) -> Numerics:
    if family == "mxfp4" and numerics == DEFAULT_NVFP4:
        numerics = DEFAULT_MXFP4
    base = get_numerics(numerics)
    wanted = "e8m0" if family == "mxfp4" else "e4m3"
    if family is not None and (base.scale_format != wanted or base.element != "e2m1"):
        valid = DEFAULT_MXFP4 if family == "mxfp4" else DEFAULT_NVFP4
        raise FormatError(
            f"Spec {spec!r} stores {family}, but {numerics!r} is another format; use {valid!r} for example."
        )
    return base


def _scoped(base: Numerics | None, scope: Scope, use: str) -> Numerics | None:
    """``base`` with another scope of its global scale; MX formats have none and stay as they are."""
    if base is None or base.scope in ("none", scope):
        return base
    return replace(base, name=f"{base.name}/{use}", scope=scope)
