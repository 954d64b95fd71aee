"""``quantize``: a policy in, a folder with FP4 weights out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tracefp4.config import Config
from tracefp4.core import SamplingParams
from tracefp4.errors import ConfigError, suggest
from tracefp4.export.calibration import Calibration, calibrate
from tracefp4.export.compressed import write_compressed
from tracefp4.export.posthoc import needs_calibration, quantize_experts, summary
from tracefp4.formats.spec import get_spec, names_bf16_layers, with_bf16_layers
from tracefp4.models.directory import LoadedModel, save_packed_model
from tracefp4.rl.collect import make_requests
from tracefp4.rl.policies import is_run, load_named, load_policy
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.tasks import make_task
from tracefp4.rollout.registry import make_engine

LAYOUTS = ("packed", "compressed-tensors")
"""How the folder is laid out: for this package, or for vLLM and SGLang (:mod:`tracefp4.export.compressed`)."""


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """What :func:`quantize` is asked for; the command's options."""

    model: str
    """A model by name, a folder, or a run."""
    output: Path
    method: str = "nvfp4"
    spec: str = "nvfp4-w4a4-kv4"
    numerics: str = "nvfp4-te"
    config: Path | None = None
    """Config whose task gives the calibration prompts; a run's own by default."""
    calibrate: bool = False
    """Calibrate also for a method that does not need it, to report weighted errors."""
    layout: str = "packed"
    """One of :data:`LAYOUTS`."""
    prompts: int = 64
    """Calibration prompts; the policy answers each once, in bfloat16."""
    device: str = "auto"
    seed: int = 0


def quantize(wanted: QuantizeSettings, note: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Quantize the expert weights of a policy and write them.

    Returns:
        What was written beside the weights: method, spec, errors overall and of each weight.

    Raises:
        ConfigError: an unknown method, a spec without NVFP4 weights, or calibration without a task.
        ModelError: the output folder has content.
    """
    spec = get_spec(wanted.spec, wanted.numerics)
    numerics = spec.weights
    if wanted.layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {wanted.layout!r}{suggest(wanted.layout, LAYOUTS)}")
    if numerics is None or numerics.scale_format != "e4m3":
        raise ConfigError(f"spec {wanted.spec!r} has no NVFP4 weights; use 'nvfp4-w4a4-kv4' for example")
    calibrated = needs_calibration(wanted.method) or wanted.calibrate
    if calibrated and wanted.config is None and not is_run(wanted.model):
        raise ConfigError("calibration needs prompts: give --config FILE with a task, or the folder of a run")
    tree, loaded = _load(wanted)
    found = None
    if calibrated and tree is not None:
        found = _calibration(tree, loaded, wanted)
        note(f"calibrated on {found.tokens} tokens; {found.unreached} experts were not reached")
    name = _deployed(wanted, tree)
    first = get_spec(name, wanted.numerics).bf16_layers
    energy = None if found is None else found.energy
    packed, rows = quantize_experts(loaded.model, wanted.method, numerics, energy, first)
    facts: dict[str, Any] = {"method": wanted.method, "model": wanted.model, "errors": summary(rows)}
    if found is not None:
        facts["calibration"] = {"prompts": wanted.prompts, "tokens": found.tokens, "unreached": found.unreached}
    if wanted.layout == "packed":
        save_packed_model(
            loaded,
            packed,
            wanted.output,
            spec=name,
            numerics=wanted.numerics,
            facts={**facts, "source": loaded.source},
        )
    else:
        peaks = None if found is None or spec.activations is None else found.peaks
        write_compressed(loaded, packed, wanted.output, peaks)
        facts["activations"] = "BF16" if peaks is None else "NVFP4"
    head = {"output": str(wanted.output), "spec": name, "numerics": wanted.numerics}
    return head | facts | {"rows": [asdict(row) for row in rows]}


def _deployed(wanted: QuantizeSettings, tree: Config | None) -> str:
    """The spec asked for, with the layers in BF16 that a run was trained with where it names no number of them."""
    if tree is None or not is_run(wanted.model) or names_bf16_layers(wanted.spec):
        return wanted.spec
    return with_bf16_layers(wanted.spec, get_spec(tree.spec).bf16_layers)


def _load(wanted: QuantizeSettings) -> tuple[Config | None, LoadedModel]:
    if wanted.config is None and not is_run(wanted.model):
        return None, load_named(wanted.model, wanted.device, wanted.seed)
    return load_policy(wanted.model, wanted.config, (), wanted.device)


def _calibration(tree: Config, loaded: LoadedModel, wanted: QuantizeSettings) -> Calibration:
    """Prompts of the training split and the policy's own bfloat16 responses to them."""
    tokenizer: Any = loaded.tokenizer
    task = make_task(tree.task)
    try:
        items = task.items("train", wanted.prompts, ("calibration", wanted.seed))
        prompter = Prompter(tokenizer, tree.task)
        sampling = SamplingParams(tree.sampling.temperature, max_new_tokens=tree.sampling.max_new_tokens)
        requests = make_requests(items, prompter, sampling, 1, wanted.seed, "calibration")
    finally:
        task.close()
    engine = make_engine(
        "embedded",
        model=copy.deepcopy(loaded.model),
        tokenizer=tokenizer,
        spec=get_spec("bf16"),
        plan=None,
        store=None,
        settings=tree.rollout.model_copy(update={"residual": 0.0}),
    )
    rollouts = engine.generate(requests, guidance=False)
    return calibrate(loaded.model, [r.tokens for r in rollouts], tree.train.micro_tokens)
