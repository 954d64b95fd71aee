"""``eval``: pass@k of a policy as it is deployed.

The policy is a model by name, a saved model, or a run: then its base model is loaded and the weights of its newest
checkpoint are put in, and the run's own config says which task is evaluated and in which deployment. A folder of
``tracefp4 quantize`` is evaluated in the format that it was quantized for, with exactly its codes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracefp4.config import Config
from tracefp4.errors import ConfigError
from tracefp4.evaluation.passk import evaluate_passk
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.methods import get_method
from tracefp4.models.directory import LoadedModel
from tracefp4.models.packed import packed_weights
from tracefp4.rl.collect import sampling_params
from tracefp4.rl.evaluate import evaluate
from tracefp4.rl.policies import load_policy
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.tasks import make_task
from tracefp4.rollout.registry import make_engine


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
    spec = _spec(wanted, tree, loaded)
    tokenizer: Any = loaded.tokenizer
    prompter, task = Prompter(tokenizer, tree.task), make_task(tree.task)
    engine = make_engine(
        tree.engine,
        # A copy: the engine overwrites its experts with their quantized values, and is then sent the weights.
        model=copy.deepcopy(loaded.model),
        tokenizer=loaded.tokenizer,
        spec=spec,
        plan=None,
        store=MemoryStore(),
        settings=tree.rollout,
    )
    state: dict[str, Any] = dict(loaded.model.named_parameters())
    if "packed" in loaded.source and spec.weights is not None:
        state |= packed_weights(Path(loaded.source["packed"]))
    try:
        engine.sync(state, 0)
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
        engine.close()
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
        "by_item": found.by_item(),
    }


def _spec(wanted: EvalSettings, tree: Config, loaded: LoadedModel) -> Spec:
    """What is asked for; else what a packed folder was made for; else what the run's engine deployed."""
    if wanted.spec is not None:
        return get_spec(wanted.spec, loaded.source.get("numerics", tree.numerics))
    if "packed" in loaded.source:
        return get_spec(loaded.source["spec"], loaded.source["numerics"])
    return get_method(tree.method).rollout_spec(get_spec(tree.spec, tree.numerics))
