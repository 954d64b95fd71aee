"""A run's choice of the basis in which keys are stored (:mod:`tracefp4.models.key_basis`)."""

from __future__ import annotations

from torch import nn

from tracefp4.config import Config
from tracefp4.formats.spec import Spec
from tracefp4.models.layout import describe
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.sft_data import gold_pairs
from tracefp4.rl.tasks.base import Task
from tracefp4.training.batch import Example
from tracefp4.training.key_basis import store_keys

ITEMS = 64
"""Training items whose targets means are taken over."""


def prepare_keys(config: Config, model: nn.Module, spec: Spec, task: Task, prompter: Prompter) -> None:
    """Store the keys of a warm-started policy in the basis that ``key_basis`` names, if they are quantized at all.

    Raises:
        ConfigError: keys that cannot be.
        TaskError: an item without a target.
    """
    if config.key_basis == "plain" or spec.kv is None:
        return
    pairs = gold_pairs(task.items("train", ITEMS, (config.seed, "key-basis")), prompter)
    examples = [Example(prompt + target, len(prompt), index=i) for i, (prompt, target) in enumerate(pairs)]
    store_keys(model, describe(model), config.key_basis, examples, config.train.micro_tokens, config.seed)
