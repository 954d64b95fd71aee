"""Settings that become objects: device, model, sites, engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from tracefp4.config import Config
from tracefp4.core import Kind
from tracefp4.errors import ConfigError, suggest
from tracefp4.formats.spec import Spec, get_spec, with_bf16_layers
from tracefp4.guidance.auto import LARGEST, budget_of
from tracefp4.guidance.plan import ALL_KINDS, Plan
from tracefp4.methods import get_method
from tracefp4.models.layout import ModelLayout
from tracefp4.models.packing import PackedState, PackedWeight
from tracefp4.quantizers.guided import DECODERS
from tracefp4.rl.centering import check_centering
from tracefp4.rl.rejection import parse_rules
from tracefp4.training.ranks import Ranks
from tracefp4.training.sharding import weights
from tracefp4.training.weights import Cache


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one; raises :class:`ConfigError` for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r} (valid: auto, cpu, cuda, cuda:N)") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no CUDA device; set device = 'cpu'")
    return device


def check_ranks(config: Config, ranks: Ranks) -> None:
    """Refuse settings that several processes cannot share; raises :class:`ConfigError` with the way out."""
    if ranks.size == 1:
        return
    if config.train.prompts < ranks.size:
        raise ConfigError(
            f"train.prompts = {config.train.prompts} is less than the {ranks.size} processes, and each needs a prompt "
            f"of its own: set train.prompts to {ranks.size} or more"
        )
    if config.engine != "embedded":
        raise ConfigError(f"several processes train with engine 'embedded' only, not {config.engine!r}")
    if get_method(config.method).guided and budget_of(config.plan) is not None:
        raise ConfigError(
            f"plan {config.plan!r} is chosen by one process; {ranks.size} processes need a plan that stays, such as "
            "'r1-all+mid'"
        )
    if ":" in config.device:
        raise ConfigError(
            f"device = {config.device!r} names one device for {ranks.size} processes; with device = 'cuda' each takes "
            "its own"
        )


def weight_cache(config: Config, ranks: Ranks) -> Cache:
    """What is kept of quantized weights; ``auto``: widened on one rank, packed where they are sharded for want of room.

    Values are the same either way.
    """
    if config.train.weight_cache != "auto":
        return config.train.weight_cache
    return "widened" if ranks.size == 1 else "packed"


def sent_weights(
    config: Config, model: nn.Module, layout: ModelLayout, spec: Spec
) -> Mapping[str, Tensor | PackedWeight]:
    """Parameters by name as a sync sends them; experts are packed where ``rollout.refit`` says so."""
    known = weights(model)
    if config.rollout.refit == "bf16" or spec.weights is None:
        return known
    return PackedState(model, layout, spec.weights, known, spec.bf16_layers)


def check_training(config: Config) -> None:
    """Refuse settings under which training would be wrong; raises :class:`ConfigError` with the way out."""
    sampling = config.sampling
    if sampling.top_p != 1.0 or sampling.top_k != 0:
        raise ConfigError(
            f"training needs the whole distribution: top_p = 1 and top_k = 0, got {sampling.top_p} and {sampling.top_k}"
        )
    if config.train.prompts % config.train.minibatches:
        raise ConfigError(
            f"train.minibatches = {config.train.minibatches} does not divide train.prompts = {config.train.prompts}"
        )
    parse_rules(config.correction.reject)
    if config.correction.low >= config.correction.high:
        raise ConfigError(
            f"correction.low = {config.correction.low} is not below correction.high = {config.correction.high}"
        )
    check_centering(config)
    if config.key_basis != "plain" and config.engine != "embedded":
        raise ConfigError(f"engine {config.engine!r} stores keys as they are; set key_basis = 'plain'")
    if config.key_basis != "plain" and config.rollout.compile_decode:
        raise ConfigError(
            "compiled decode layers share one graph, and each layer's keys have a basis of their own; set "
            "rollout.compile_decode = false or key_basis = 'plain'"
        )
    method = get_method(config.method)
    deployed = method.rollout_spec(get_spec(config.spec, config.numerics))
    if config.rollout.refit == "packed" and deployed.weights is None:
        raise ConfigError(
            f"rollout.refit = 'packed' sends quantized experts, but spec {deployed.name!r} of method "
            f"{config.method!r} leaves them as they are; set rollout.refit = 'bf16'"
        )
    if method.guided:
        if config.rollout.residual and set(method.kinds) & {Kind.EXPERTS_IN, Kind.EXPERTS_MID}:
            raise ConfigError(
                f"method {config.method!r} records one rounding of each value, and rollout.residual adds a second that "
                "guidance does not know; set rollout.residual = 0"
            )
        budget = budget_of(config.plan)
        if budget is not None and method.kinds != ALL_KINDS:
            raise ConfigError(f"plan {config.plan!r} is chosen among all sites, which method 'trace' alone follows")
        if budget is not None and config.train.lag:
            raise ConfigError(
                f"plan {config.plan!r} changes as training goes, train.lag = {config.train.lag} mixes steps"
            )
        # The model is not loaded yet; only its depth would differ.
        plan = LARGEST if budget is not None else Plan.parse(config.plan, num_layers=4)
        if not plan:
            raise ConfigError(
                f"method {config.method!r} follows a plan, and plan 'none' records nothing; use method "
                f"{'qat' if method.kinds == ALL_KINDS else 'quads'!r}"
            )
        plan = method.plan(plan)
        if min(config.train.lag, config.train.guided_lag) and plan.scale_bits != 8:
            raise ConfigError(
                f"plan '{plan}' restores block scales from the trainer's own, and train.lag = {config.train.lag} lets "
                f"them drift apart; use plan '{replace(plan, scale_bits=8)}'"
            )
        if plan.checked and config.engine != "embedded":
            raise ConfigError(
                f"plan '{plan}' pulls bits while it trains, which engine {config.engine!r} does not serve; "
                f"use plan '{replace(plan, checked=False)}'"
            )
        check_decoder(plan, config.decoder)
    if config.loss.overlong_buffer > config.sampling.max_new_tokens:
        raise ConfigError("loss.overlong_buffer is longer than sampling.max_new_tokens")


def check_decoder(plan: Plan, decoder: str) -> None:
    """Raise :class:`ConfigError` for a decoder that is unknown or cannot read the bits of ``plan``."""
    if decoder not in DECODERS:
        raise ConfigError(f"unknown decoder {decoder!r}{suggest(decoder, DECODERS)}")
    if decoder == "replay" and plan.bits != 4:
        raise ConfigError(
            f"decoder 'replay' needs whole codes, plan '{plan}' keeps {plan.bits} bits; "
            f"use decoder 'bracket' or plan '{replace(plan, bits=4)}'"
        )


def config_hash(config: Config) -> str:
    """Hash of every setting that shapes the numbers of a run; folder, tracker, threads and caches do not.

    Neither does its length, unless the learning rate falls towards it, nor the number of layers in BF16 that comes of a
    plan that is chosen.
    """
    length = ("steps",) if config.optimizer.schedule == "constant" else ()
    free = dict.fromkeys((*length, "max_minutes", "output_dir", "tracker", "threads"), True)
    data = config.model_dump(mode="json", exclude={**free, "train": {"weight_cache"}})
    if get_method(config.method).guided and budget_of(config.plan) is not None:
        data["spec"] = with_bf16_layers(config.spec, 0)
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=12).hexdigest()
