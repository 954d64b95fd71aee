"""Weights on their way to an engine: one safetensors file, in which expert weights may be packed.

A plain parameter is a tensor under its name. A packed one (:class:`~tracefp4.models.packing.PackedWeight`) is its
parts::

    <name>.codes    uint8 (E, out, in / 2), two codes a byte
    <name>.scales   uint8 (E, out, in / block)
    <name>.global   float32 (E, 1, 1); absent where the numerics has no global scale

The file's metadata names every packed weight with the shape that it stands for and its arithmetic, all choices of it
written out. So a reader needs nothing else, and notices a part that is missing, of another shape, or left over. Nothing
in the file is code.

:func:`to_parts` and :func:`from_parts` are the one pair that knows the parts; packed folders
(:mod:`tracefp4.models.packed`) use them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats.numerics import Numerics
from tracefp4.models.packing import PackedWeight

_KEY = "tracefp4_packed"
"""Entry of the metadata: packed weights by name."""
_PARTS = ("codes", "scales", "global")


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the metadata says of packed weights."""

    weights: dict[str, tuple[tuple[int, int, int], str]]
    """Shape ``(E, out, in)`` and hash of the numerics, by name."""
    numerics: dict[str, dict[str, Any]]
    """All choices of each numerics, by hash."""


def to_parts(packed: Mapping[str, PackedWeight]) -> dict[str, Tensor]:
    """The parts of packed weights on the CPU, ``<name>.codes``, ``.scales`` and ``.global``."""
    found: dict[str, Tensor] = {}
    for name, weight in packed.items():
        # One after the other: `parts` leaves out a global scale that is not there.
        for part, tensor in zip(_PARTS, weight.parts(), strict=False):
            found[f"{name}.{part}"] = tensor.detach().cpu().contiguous()
    return found


def from_parts(tensors: Mapping[str, Tensor], expected: Mapping[str, Numerics]) -> dict[str, PackedWeight]:
    """The inverse of :func:`to_parts`.

    Args:
        tensors: parts, and any others.
        expected: numerics of the packed weights by name.

    Raises:
        FormatError: naming a part that is missing, or does not fit the others.
    """
    found = {}
    for name, numerics in expected.items():
        for part in _PARTS[:2]:
            if f"{name}.{part}" not in tensors:
                raise FormatError(f"packed weight {name!r} is incomplete: it has no part {name + '.' + part!r}")
        codes, scales = (tensors[f"{name}.{part}"] for part in _PARTS[:2])
        found[name] = PackedWeight(codes, scales, tensors.get(f"{name}.{_PARTS[2]}"), numerics)
        found[name].check(name)
    return found


def write_weights(path: Path, state: Mapping[str, Tensor | PackedWeight]) -> int:
    """Write weights.

    Args:
        path: of the file.
        state: by name, on any device.

    Returns:
        Bytes of the tensors.

    Raises:
        FormatError: a packed weight whose parts do not fit one another, or whose part has another weight's name.
    """
    packed = {name: weight for name, weight in state.items() if isinstance(weight, PackedWeight)}
    for name, weight in packed.items():
        weight.check(name)
    # Stored slices would bring their whole tensor along, so each is made contiguous.
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items() if isinstance(tensor, Tensor)}
    parts = to_parts(packed)
    both = sorted(plain.keys() & parts.keys())
    if both:
        raise FormatError(f"{both[0]!r} is a parameter and a part of a packed weight; send that weight unpacked")
    head = _Head(
        {name: (weight.shape, weight.numerics.hash) for name, weight in packed.items()},
        {weight.numerics.hash: asdict(weight.numerics) for weight in packed.values()},
    )
    save_file(plain | parts, path, metadata={_KEY: msgspec.json.encode(head).decode()})
    return sum(tensor.nbytes for tensor in (plain | parts).values())


def read_weights(path: Path) -> dict[str, Tensor | PackedWeight]:
    """Read what :func:`write_weights` wrote, onto the CPU.

    Raises:
        FormatError: the file cannot be read, or a packed weight in it is not whole; the sentence names the tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            told = (file.metadata() or {}).get(_KEY)
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise FormatError(f"weights in {str(path)!r} cannot be read: {error}") from error
    if told is None:
        raise FormatError(f"{str(path)!r} does not say which of its weights are packed; it was not written for a sync")
    expected, shapes = _expected(path, told)
    packed = from_parts(tensors, expected)
    for name, weight in packed.items():
        if weight.shape != shapes[name]:
            raise FormatError(f"packed weight {name!r} has codes of shape {weight.shape}, the file says {shapes[name]}")
    used = {f"{name}.{part}" for name in packed for part in _PARTS}
    return packed | {name: tensor for name, tensor in tensors.items() if name not in used}


def _expected(path: Path, told: str) -> tuple[dict[str, Numerics], dict[str, tuple[int, int, int]]]:
    """Numerics and shape of each packed weight, by name."""
    try:
        head = msgspec.json.decode(told, type=_Head)
        known = {key: Numerics(**choices) for key, choices in head.numerics.items()}
        expected = {name: known[key] for name, (_, key) in head.weights.items()}
    except (msgspec.DecodeError, TypeError, KeyError, FormatError) as error:
        raise FormatError(f"{str(path)!r} describes its packed weights in words of another release: {error}") from error
    for key, numerics in known.items():
        if numerics.hash != key:
            raise FormatError(f"{str(path)!r} names numerics {numerics.name!r} whose hash is not {key}")
    return expected, {name: shape for name, (shape, _) in head.weights.items()}
