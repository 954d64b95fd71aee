"""A policy by name: a model, a folder, or a run, whose newest checkpoint is put into its base model."""

from __future__ import annotations

from pathlib import Path

from tracefp4 import config as settings
from tracefp4.config import Config
from tracefp4.errors import CheckpointError, ConfigError
from tracefp4.models.directory import LoadedModel
from tracefp4.models.layout import describe
from tracefp4.models.loading import load_model
from tracefp4.rl.setup import resolve_device
from tracefp4.training import checkpoint
from tracefp4.training.key_basis import FILE, read_bases


def is_run(name: str) -> bool:
    """Whether ``name`` is the folder of a run."""
    folder = Path(name)
    return (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir()


def load_named(name: str, device: str, seed: int = 0) -> LoadedModel:
    """Load a model by name, or the newest checkpoint of a run.

    Raises:
        CheckpointError: a run without a complete checkpoint.
        ModelError: no such model.
    """
    if is_run(name):
        return load_policy(name, None, (), device)[1]
    return load_model(name, device=resolve_device(device), seed=seed)


def load_policy(name: str, config: Path | None, overrides: tuple[str, ...], device: str) -> tuple[Config, LoadedModel]:
    """Load a model, or the newest checkpoint of a run, with the config that describes its task.

    Raises:
        ConfigError: a plain model without a config.
        CheckpointError: a run without a complete checkpoint.
    """
    folder, run = Path(name), is_run(name)
    if config is None and not run:
        raise ConfigError(f"{name!r} is not a run; give --config FILE, whose task is evaluated")
    tree = settings.load(config if config is not None else folder / "config.toml", overrides)
    loaded = load_model(tree.policy if run else name, device=resolve_device(device), seed=tree.seed)
    if run:
        found = checkpoint.complete(folder / "checkpoints")
        if not found:
            raise CheckpointError(f"run {name!r} has no complete checkpoint")
        weights, _, _ = checkpoint.load(found[-1])
        checkpoint.restore(loaded.model, weights, f"checkpoint {found[-1]}")
        read_bases(loaded.model, describe(loaded.model), folder / FILE)
    return tree, loaded
