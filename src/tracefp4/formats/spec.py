"""A spec says how a model is deployed: which numerics its weights, activations and KV cache have.

One base numerics (``nvfp4-te`` by default) fixes the arithmetic; the three uses differ only in what shares a global
scale:

``weights``      one per expert tensor, known long before use; gate and up share it because they are one tensor
``activations``  one per row, computed on the fly, so that a token's result does not depend on its batch
``kv``           a constant of the layer: a reduction over heads or tokens would tie cache entries to each other
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

from tracefp4.core import KV_KINDS, Kind
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
"""Names of all specs."""


@dataclass(frozen=True)
class Spec:
    """How a model is deployed. ``None`` leaves a tensor in bfloat16."""

    name: str
    weights: Numerics | None
    activations: Numerics | None
    kv: Numerics | None

    @cached_property
    def hash(self) -> str:
        """Sixteen hex characters over the name and the hashes of the three numerics."""
        parts = [self.name, *(n.hash if n else "-" for n in (self.weights, self.activations, self.kv))]
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).hexdigest()

    def for_kind(self, kind: Kind) -> Numerics | None:
        """Numerics of a site: ``kv`` for K, V and the latent, ``activations`` for the experts' inputs."""
        return self.kv if kind in KV_KINDS else self.activations


def get_spec(name: str, numerics: str = DEFAULT_NVFP4, *, kv: str | None = None) -> Spec:
    """The spec ``name``, computed with the arithmetic of a preset.

    Args:
        name: one of :data:`SPECS`.
        numerics: preset that the FP4 tensors follow. An MXFP4 spec takes an ``mxfp4`` preset; the default names an
            NVFP4 formula and means ``mxfp4-ceil`` there.
        kv: another preset for the KV cache, such as ``sglang-kv-mx``.

    Raises:
        FormatError: unknown spec or preset, or a preset of another format.
    """
    if name not in _SPECS:
        raise FormatError(f"Unknown spec {name!r}{suggest(name, SPECS)}.")
    weights, activations, cache = _SPECS[name]
    base = _base(name, weights or cache, numerics)
    uses = {"nvfp4": base, "mxfp4": base, "mxfp8": get_numerics("mxfp8"), None: None}
    cached = get_numerics(kv) if kv and cache else uses[cache]
    return Spec(
        name,
        weights=_scoped(uses[weights], "tensor", "weight"),
        activations=_scoped(uses[activations], "token", "activation"),
        kv=_scoped(cached, "constant", "kv"),
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
