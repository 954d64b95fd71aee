"""``eval``: pass@k of a policy as it is deployed.

The policy is a model by name, a saved model, or a run: then its base model is loaded and the weights of its newest
checkpoint are put in, and the run's own config says which task is evaluated and in which deployment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracefp4 import config as settings
from tracefp4.config import Config
from tracefp4.errors import CheckpointError, ConfigError
from tracefp4.evaluation.passk import evaluate_passk
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.methods import get_method
from tracefp4.models.directory import LoadedModel
from tracefp4.models.loading import load_model
from tracefp4.rl.collect import sampling_params
from tracefp4.rl.evaluate import evaluate
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.setup import resolve_device
from tracefp4.rl.tasks import make_task
from tracefp4.rollout.registry import make_engine
from tracefp4.training import checkpoint


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """What ``evaluate_policy`` is asked for; the command's options."""

    model: str
    config: Path | None
    overrides: tuple[str, ...]
    spec: str | None
    items: int
    samples: int
    ks: tuple[int, ...]
    temperature: float
    threshold: float
    device: str
    seed: int


def evaluate_policy(wanted: EvalSettings) -> dict[str, Any]:
    """Sample held-out items and estimate pass@k with intervals.

    Raises:
        ConfigError: no task is known, or ``samples`` is less than the largest ``k``.
    """
    if max(wanted.ks) > wanted.samples:
        raise ConfigError(
            f"pass@{max(wanted.ks)} needs at least {max(wanted.ks)} samples an item, got {wanted.samples}"
        )
    tree, loaded = load_policy(wanted.model, wanted.config, wanted.overrides, wanted.device)
    deployed = get_spec(tree.spec, tree.numerics)
    spec = (
        get_method(tree.method).rollout_spec(deployed) if wanted.spec is None else get_spec(wanted.spec, tree.numerics)
    )
    tokenizer: Any = loaded.tokenizer
    prompter, task = Prompter(tokenizer, tree.task), make_task(tree.task)
    engine = make_engine(
        tree.engine,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        spec=spec,
        plan=None,
        store=MemoryStore(),
        settings=tree.rollout,
    )
    engine.sync(dict(loaded.model.named_parameters()), 0)
    try:
        found = evaluate(
            engine,
            task,
            prompter,
            items=wanted.items,
            samples=wanted.samples,
            sampling=sampling_params(tree, wanted.temperature),
            seed=wanted.seed,
            decode=prompter.decode,
        )
    finally:
        task.close()
    solved = [[bool(s >= wanted.threshold) for s in row] for row in found.scores]
    return {
        "model": wanted.model,
        "spec": spec.name,
        "task": task.name,
        "items": len(solved),
        "samples": wanted.samples,
        "temperature": wanted.temperature,
        "pass": {f"pass@{row.k}": row.to_dict() for row in evaluate_passk(solved, wanted.ks, seed=wanted.seed)},
        "score": found.mean().to_dict(),
    }


def load_policy(name: str, config: Path | None, overrides: tuple[str, ...], device: str) -> tuple[Config, LoadedModel]:
    """Load a model, or the newest checkpoint of a run, with the config that describes its task.

    Raises:
        ConfigError: a plain model without a config.
        CheckpointError: a run without a complete checkpoint.
    """
    folder = Path(name)
    is_run = (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir()
    if config is None and not is_run:
        raise ConfigError(f"{name!r} is not a run; give --config FILE, whose task is evaluated")
    tree = settings.load(config if config is not None else folder / "config.toml", overrides)
    loaded = load_model(tree.policy if is_run else name, device=resolve_device(device), seed=tree.seed)
    if is_run:
        found = checkpoint.complete(folder / "checkpoints")
        if not found:
            raise CheckpointError(f"run {name!r} has no complete checkpoint")
        weights, _, _ = checkpoint.load(found[-1])
        checkpoint.restore(loaded.model, weights, f"checkpoint {found[-1]}")
    return tree, loaded
