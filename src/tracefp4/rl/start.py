"""How the policy of a run starts: warm, and with its keys in the basis that the run chose."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tracefp4.config import Config
from tracefp4.formats.spec import get_spec
from tracefp4.methods.base import Method
from tracefp4.models.directory import cache_dir
from tracefp4.models.layout import describe
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.sft_data import Pair, check_targets, gold_pairs
from tracefp4.rl.tasks.base import Task
from tracefp4.rl.warm_start import WarmStart, warm_start
from tracefp4.training.batch import Example
from tracefp4.training.key_basis import store_keys

ITEMS = 64
"""Training items whose targets means are taken over."""


def start_warm(
    config: Config, model: nn.Module, task: Task, prompter: Prompter, progress: Callable[[int, float], None] | None
) -> WarmStart:
    """Warm-start a policy in place, as ``warm_start`` says; see :func:`tracefp4.rl.warm_start.warm_start`.

    Raises:
        TaskError: an item without a target, or with one that does not earn the full reward.
        FormatError: unknown spec, or one that ``numerics`` does not fit.
    """
    if config.warm_start.steps:
        check_targets(task, seed=(config.seed, "check-targets"))

    def pairs(step: int) -> list[Pair]:
        items = task.items("train", config.warm_start.batch_size, (config.seed, "warm-start", step))
        return gold_pairs(items, prompter)

    return warm_start(
        model,
        config.warm_start,
        pairs,
        identity={"task": config.task.model_dump(mode="json"), "seed": config.seed},
        cache=cache_dir() / "warm-starts",
        micro_tokens=config.train.micro_tokens,
        numerics=config.numerics,
        cuda_graphs=config.train.cuda_graphs,
        progress=progress,
    )


def prepare_keys(config: Config, model: nn.Module, method: Method, task: Task, prompter: Prompter) -> None:
    """Store the keys of a warm-started policy in the basis that ``key_basis`` names, if they are quantized at all.

    Raises:
        ConfigError: keys that cannot be.
        TaskError: an item without a target.
    """
    spec = method.rollout_spec(get_spec(config.spec, config.numerics))
    if config.key_basis == "plain" or spec.kv is None:
        return
    pairs = gold_pairs(task.items("train", ITEMS, (config.seed, "key-basis")), prompter)
    examples = [Example(prompt + target, len(prompt), index=i) for i, (prompt, target) in enumerate(pairs)]
    store_keys(model, describe(model), config.key_basis, examples, config.train.micro_tokens, config.seed)
