"""What a plugin is told, as one JSON file that every process of the engine finds through an environment variable.

Engines start their workers as new processes, often with a fresh interpreter. What reaches all of them is the
environment, so it names a file, and the file holds everything: the deployment spec with all its numerics, the plan, the
model's folder, and the folder where frames go. Without the variable a plugin does nothing at all: having tracefp4
installed changes no engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from tracefp4.errors import ConfigError
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import Spec
from tracefp4.guidance.plan import Plan

VARIABLE = "TRACEFP4_ENGINE"
"""Environment variable with the path of the settings file."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. Plain data; :attr:`spec` and :attr:`plan` are read by their methods."""

    model: str
    """Folder with the model's configuration and first weights, as ``save_pretrained`` writes it."""
    folder: str
    """Where frames, routes and reports go; the engine writes, the trainer takes."""
    deployed: dict[str, Any]
    """The spec, as :func:`dump_spec` writes it."""
    planned: str = "none"
    """Name of the plan."""
    emulate: bool = True
    """Compute FP4 in our own arithmetic; off: the engine has kernels for it, and is only observed."""

    @property
    def spec(self) -> Spec:
        """The spec."""
        return load_spec(self.deployed)

    @property
    def plan(self) -> Plan | None:
        """The plan, ``None`` for ``none``.

        A name without scale bits means whole scales here: how far an engine's own kernels move scales from a trainer's
        was never measured on a GPU, and only checks, which nobody repairs, would show it.
        """
        return Plan.recorded(self.planned) or None

    def write(self, path: Path) -> None:
        """Write the settings file."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))


def read_settings(path: str | os.PathLike[str]) -> EngineSettings:
    """Read a settings file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=EngineSettings)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"engine settings {str(path)!r} cannot be read: {error}") from error


def active_settings() -> EngineSettings | None:
    """The settings that this process was started with, ``None`` without :data:`VARIABLE`."""
    path = os.environ.get(VARIABLE)
    return read_settings(path) if path else None


def dump_spec(spec: Spec) -> dict[str, Any]:
    """A spec as plain data."""
    parts = {"weights": spec.weights, "activations": spec.activations, "kv": spec.kv}
    head = {"name": spec.name, "bf16_layers": spec.bf16_layers}
    return head | {use: None if n is None else asdict(n) for use, n in parts.items()}


def load_spec(data: Mapping[str, Any]) -> Spec:
    """The inverse of :func:`dump_spec`: a spec with the same hash.

    Raises:
        ConfigError: fields that no spec has.
    """
    try:
        parts = {use: None if data[use] is None else Numerics(**data[use]) for use in ("weights", "activations", "kv")}
        return Spec(data["name"], **parts, bf16_layers=data.get("bf16_layers", 0))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"this is no dumped spec: {error}") from error
