"""How many of its first layers a policy leaves in BF16 (``plan = "auto:<bytes>"``), settled before a run begins.

The search is :func:`tracefp4.guidance.auto.choose_depth`; this samples for it. Each number of layers is a deployment of
its own: another engine, other log-probs, and a plan chosen on rollouts of that engine. It is what is served, evaluated
and exported in the end, its KV pool and its weights are laid out for it, and a policy that trains under one and is
served under another has not been trained for it. So it is chosen once, on the prompts of a step before the first, and
written into the run's configuration; the plan for the other layers is looked at again as training goes.

A spec that names a number (``nvfp4-w4a4-kv4/b0``) is left as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch import nn

from tracefp4.config import Config
from tracefp4.core import Request
from tracefp4.errors import CheckpointError
from tracefp4.formats.spec import Spec, get_spec, names_bf16_layers, with_bf16_layers
from tracefp4.guidance import frame
from tracefp4.guidance.auto import LARGEST, Choice, budget_of, choose_depth, depths
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.methods import get_method
from tracefp4.models.binding import bound
from tracefp4.models.footprint import footprint
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.rl.collect import make_requests, sampling_params
from tracefp4.rl.plans import SEQUENCES, choose_measured
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.setup import sent_weights
from tracefp4.rl.tasks.base import Task
from tracefp4.rollout.registry import make_engine
from tracefp4.training.sites import TrainerSites


def is_open(config: Config) -> bool:
    """Whether a run is free to leave layers in BF16: it chooses its plan, and its spec names no number of them."""
    chosen = get_method(config.method).guided and budget_of(config.plan) is not None
    return chosen and config.engine == "embedded" and not names_bf16_layers(config.spec)


def tried_depths(spec: str, engine: str, num_layers: int) -> tuple[int, ...]:
    """What a choice may be: the number that ``spec`` names, none for engines that have one format for all layers."""
    if names_bf16_layers(spec):
        return (get_spec(spec).bf16_layers,)
    return depths(num_layers) if engine == "embedded" else (0,)


def priced(choice: Choice, layout: ModelLayout, spec: Spec, plain: Spec) -> str:
    """A choice under ``spec`` in words, and what its layers in BF16 cost beside the spec ``plain``."""
    choice = replace(choice, bf16_layers=spec.bf16_layers)
    if spec.bf16_layers == plain.bf16_layers:
        return str(choice)
    return f"{choice}; {footprint(layout, spec).beside(footprint(layout, plain))}"


def settled(
    config: Config,
    saved: str | None,
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    prompter: Prompter,
    note: Callable[[str], None] = lambda _: None,
) -> Config:
    """The settings of a run with a spec that says how many layers are left in BF16, if that is for the run to choose.

    Args:
        config: of the run.
        saved: spec of the checkpoint that it goes on from, which is kept; empty for one from before layers could be
            left in BF16, ``None`` for a run from the start.
        model: warm-started, on its device, without site objects.
        tokenizer: of the model.
        task: where prompts come from.
        prompter: how they are written.
        note: called with a sentence for each number of layers that was tried.

    Raises:
        CheckpointError: the checkpoint is of another number than the spec names.
        ConfigError: the budget has room for nothing.
    """
    if not is_open(config):
        if saved and get_spec(saved).bf16_layers != get_spec(config.spec).bf16_layers:
            raise CheckpointError(
                f"{config.output_dir} holds a checkpoint of spec {saved!r}, not {config.spec!r}; choose another "
                "output_dir or remove the folder"
            )
        return config
    name = _chosen(config, model, tokenizer, task, prompter, note) if saved is None else saved or f"{config.spec}/b0"
    return config.model_copy(update={"spec": name})


def _chosen(
    config: Config, model: nn.Module, tokenizer: Any, task: Task, prompter: Prompter, note: Callable[[str], None]
) -> str:
    layout, plain = describe(model), get_spec(config.spec, config.numerics)
    items = task.items("train", SEQUENCES, (config.seed, "bf16-layers"))
    requests = make_requests(items, prompter, sampling_params(config), 1, config.seed, "bf16-layers")

    def choose(layers: int) -> Choice:
        spec = get_spec(with_bf16_layers(config.spec, layers), config.numerics)
        choice = _choose(config, spec, model, tokenizer, layout, requests)
        note(f"{spec.name}: {priced(choice, layout, spec, plain)}")
        return choice

    best = choose_depth(tried_depths(config.spec, config.engine, layout.num_layers), choose)
    return f"{with_bf16_layers(config.spec, 0)}/b{best.bf16_layers}"


def _choose(
    config: Config, spec: Spec, model: nn.Module, tokenizer: Any, layout: ModelLayout, requests: Sequence[Request]
) -> Choice:
    """The best plan under a spec, on rollouts of it."""
    store, method = MemoryStore(), get_method(config.method)
    deployed, trained = method.rollout_spec(spec), method.trainer_spec(spec)
    engine = make_engine(
        config.engine,
        model=copy.deepcopy(model),
        tokenizer=tokenizer,
        spec=deployed,
        plan=LARGEST,
        store=store,
        settings=config.rollout,
    )
    with closing(engine):
        engine.sync(sent_weights(config, model, layout, deployed), 0)
        rollouts = [rollout for rollout in engine.generate(requests) if rollout.response_ids]
    records = [frame.decode(store.get(rollout.guidance)) for rollout in rollouts if rollout.guidance is not None]
    sites = TrainerSites(layout, trained, config.decoder)
    with bound(model, sites, spec=trained):
        return choose_measured(
            model, sites, layout.recordable_shapes(trained), rollouts, records, budget_of(config.plan) or 0,
            temperature=config.sampling.temperature, micro_tokens=config.train.micro_tokens, pulls=True,
        )  # fmt: skip
