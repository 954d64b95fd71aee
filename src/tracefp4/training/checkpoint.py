"""Checkpoints: everything that an exact resume needs, in safetensors and JSON, with a hash of every file.

A checkpoint is a folder ``step-000012`` holding ``model.safetensors`` (the bfloat16 weights), ``optimizer.safetensors``
(FP32 masters and moments), ``state.json`` (step, weight version, config hash) and ``manifest.json`` (size and xxh3 hash
of each file, written last). It is built in a temporary folder and renamed, so a checkpoint exists whole or not at all.
A flipped bit in a safetensors file loads without an error; the manifest catches it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tracefp4.errors import CheckpointError

_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


@dataclass(frozen=True, slots=True)
class TrainState:
    """Counters of a run. Random numbers need no state: every draw is keyed by seed and step."""

    step: int
    weight_version: int
    optimizer_steps: int
    config_hash: str
    plan: str = ""
    """What the engine records; empty without guidance."""
    warm_start: str = ""
    """Name of what the run began from."""
    spec: str = ""
    """The run's, with the number of layers in BF16 that a run which chooses its plan has settled on."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was read; tensors on the CPU."""

    folder: Path
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: TrainState


def save(
    root: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: TrainState, keep: int
) -> Path:
    """Write a checkpoint atomically and remove all but the newest ``keep``.

    Args:
        root: folder of the run's checkpoints.
        model: bfloat16 weights by name, without duplicates of tied ones.
        optimizer: masters and moments by name.
        state: counters.
        keep: complete checkpoints to keep.

    Returns:
        The checkpoint's folder.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{state.step:06d}"
    temporary = root / f".writing-{state.step:06d}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_file(_owned(model), temporary / "model.safetensors")
    save_file(_owned(optimizer), temporary / "optimizer.safetensors")
    (temporary / "state.json").write_text(json.dumps(asdict(state)), encoding="utf-8")
    manifest = {name: {"bytes": (temporary / name).stat().st_size, "xxh3": _hash(temporary / name)} for name in _FILES}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    for old in complete(root)[:-keep]:
        shutil.rmtree(old)
    return final


def attend(model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
    """Take part in :func:`save` on a rank that writes nothing: sharded tensors are gathered by all ranks at once."""
    for tensors in (model, optimizer):
        for _ in tensors.values():
            pass


def complete(root: Path) -> list[Path]:
    """Finished checkpoints under ``root``, oldest first; interrupted ones do not count."""
    return sorted(p for p in root.glob("step-*") if (p / "manifest.json").is_file())


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], TrainState]:
    """Read a checkpoint after checking every file against the manifest.

    Returns:
        Model weights, optimizer tensors, counters (tensors on the CPU).

    Raises:
        CheckpointError: a file is missing, has another size or another hash; the message names it.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable manifest.json: {error}") from error
    if sorted(manifest) != sorted(_FILES):
        raise CheckpointError(f"checkpoint {folder}: manifest lists {sorted(manifest)}, expected {sorted(_FILES)}")
    for name in _FILES:
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint file {file} is missing")
        if file.stat().st_size != manifest[name]["bytes"]:
            raise CheckpointError(
                f"checkpoint file {file} has {file.stat().st_size} bytes, not {manifest[name]['bytes']}"
            )
        if _hash(file) != manifest[name]["xxh3"]:
            raise CheckpointError(f"checkpoint file {file} was altered: its hash differs from the manifest")
    state = TrainState(**json.loads((folder / "state.json").read_text(encoding="utf-8")))
    return load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors"), state


def newest(root: Path, config_hash: str) -> Saved | None:
    """Read the newest finished checkpoint under ``root``; ``None`` if there is none.

    Raises:
        CheckpointError: it is damaged (see :func:`load`), or a run with another ``config_hash`` wrote it.
    """
    found = complete(root)
    if not found:
        return None
    model, optimizer, state = load(found[-1])
    if state.config_hash != config_hash:
        raise CheckpointError(
            f"{found[-1]} was written with other settings; choose another output_dir or remove the folder"
        )
    return Saved(found[-1], model, optimizer, state)


@torch.no_grad()
def restore(model: nn.Module, weights: Mapping[str, Tensor], label: str) -> None:
    """Copy weights into a model's parameters.

    Args:
        model: whose parameters are overwritten.
        weights: every parameter by name, and nothing else.
        label: what messages call the source.

    Raises:
        CheckpointError: a parameter is missing, unknown, or of another shape or dtype; nothing was copied then.
    """
    parameters = dict(model.named_parameters())
    different = sorted(parameters.keys() ^ weights.keys())
    if different:
        side = "the model" if different[0] in weights else "it"
        raise CheckpointError(f"{label} is of another model: {side} has no parameter {different[0]!r}")
    for name, parameter in parameters.items():
        tensor = weights[name]
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            raise CheckpointError(
                f"{label} is of another model: {name!r} is {tensor.dtype} {tuple(tensor.shape)} there and "
                f"{parameter.dtype} {tuple(parameter.shape)} here"
            )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().contiguous().cpu() for name, t in tensors.items()}


def _hash(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
