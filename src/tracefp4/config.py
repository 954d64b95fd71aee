"""Configuration: one typed tree, read from TOML, every key documented where it is declared.

``load(path, overrides)`` reads a file, applies ``a.b=c`` overrides and validates. Unknown keys are refused with the
nearest valid name. The resolved tree is written beside the results, so a run can be repeated from its own folder.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tracefp4.errors import ConfigError, suggest

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How token losses become one number; ``rl/losses.py`` has the formulas."""


LOSS_DEFAULTS: dict[str, dict[str, Any]] = {
    "dapo": {"eps_high": 0.28},
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    "cispo": {"eps_low": 1.0},
    "tbpo": {"eps_low": 3e-4, "eps_high": 4e-4, "aggregation": "seq-mean-token-mean"},
}
"""What a loss changes of the defaults of ``[loss]`` when its name is given: the settings of its paper."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EngineConfig(_Table):
    """The rollout engine."""

    max_tokens: int = Field(default=16384, gt=0)
    """Slots of the KV pool: tokens of all running sequences together."""
    page_size: int = Field(default=16, gt=0)
    """Tokens a page of the KV pool."""
    max_batch: int = Field(default=64, gt=0)
    """Sequences decoded at once."""
    prefill_chunk: int = Field(default=2048, gt=0)
    """Prompt tokens forwarded at once."""
    cuda_graphs: bool = True
    """Capture the decode step in CUDA graphs where the model permits it."""
    compile_decode: bool = False
    """Compile the decoder layers for decode steps; the first steps of a run take some seconds more."""
    refit: Literal["bf16", "packed"] = "bf16"
    """How expert weights travel to the engine at a sync: ``bf16``, as the trainer's forward uses them, and the engine
    quantizes them; ``packed``, as the codes and scales that the trainer quantizes them to (NVFP4: 3.6 times fewer
    bytes)."""
    residual: float = Field(default=0.0, ge=0, le=1)
    """Share of each token's channels whose quantization residual is added to the experts' inputs (method ``quads``)."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the recurrent states of linear attention are kept in between tokens (hybrid models); ``bfloat16`` halves
    their bytes and rounds them at every token, whatever the method."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an engine of another package, under its own names; ``embedded`` takes none."""


class SamplingConfig(_Table):
    """How rollouts are sampled."""

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; log-probs are taken after it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; training refuses anything but 1."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens (0: all); training refuses anything but 0."""
    max_new_tokens: int = Field(default=128, gt=0)
    """Response length limit."""


class TaskConfig(_Table):
    """What the policy is trained on."""

    kind: Literal["reasoning_gym", "files"] = "reasoning_gym"
    """``reasoning_gym``: generators by name; ``files``: JSONL or parquet."""
    name: str = ""
    """Generator name, or a label for metrics."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task (generator parameters, file paths, template, scoring); see ``docs/tasks.md``."""


class WarmStartConfig(_Table):
    """Supervised fine-tuning before RL; deterministic on one machine, and cached by a hash of what shapes it."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 skips the warm start."""
    batch_size: int = Field(default=32, gt=0)
    """Examples a step."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate, linear warm-up over the first tenth, cosine decay."""
    router_aux: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of the routers."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    spec: str = "bf16"
    """Quantized while it is fine-tuned, for every arm alike: ``nvfp4-w4a4-kv4`` makes a start that FP4 costs little."""


class LossConfig(_Table):
    """The policy-gradient loss."""

    name: Literal["grpo", "dapo", "gspo", "cispo", "reinforce", "tbpo"] = "grpo"
    """``grpo`` and ``dapo``: token ratios with PPO clipping; ``gspo``: one length-normalised ratio a sequence;
    ``cispo``: clipped ratio as a weight; ``reinforce``: no ratio; ``tbpo``: sequence ratios, samples with negative
    advantage dropped outside the clip range."""
    eps_low: float = Field(default=0.2, gt=0)
    """Lower clip range. Other defaults: gspo, tbpo 3e-4; cispo 1 (no lower bound)."""
    eps_high: float = Field(default=0.2, gt=0)
    """Upper clip range. Other defaults: dapo 0.28; gspo, tbpo 4e-4."""
    dual_clip: float = Field(default=3.0, ge=1)
    """Bound on the loss of samples with negative advantage (grpo, dapo)."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the k3 penalty against the reference policy (the warm-started weights)."""
    aggregation: Aggregation = "token-mean"
    """How token losses become one number. Other defaults: gspo, tbpo seq-mean-token-mean."""
    score_centering: bool = False
    """Subtract the expected score of the sampler, from its top-k log-probs (needs an engine that returns them)."""
    centering_top: int = Field(default=128, gt=0)
    """Tokens of the sampler's distribution that score centering knows at each position; the rest is modelled."""
    norm_std: bool = True
    """Divide advantages by the group's standard deviation (off: Dr. GRPO)."""
    filter_groups: bool = True
    """Drop groups whose rewards are all equal: they train nothing."""
    overlong_buffer: int = Field(default=0, ge=0)
    """DAPO's soft penalty on the last tokens before the length limit; 0 is off."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_loss(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return LOSS_DEFAULTS.get(str(data.get("name")), {}) | data


class CorrectionConfig(_Table):
    """Off-policy correction of the train-rollout mismatch."""

    name: Literal["none", "tis", "mis", "icepop"] = "tis"
    """Weight of a token by its ratio r of trainer to rollout: ``tis`` min(r, cap); ``mis`` r up to the cap, else 0;
    ``icepop`` r between ``low`` and ``high``, else 0."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio: the token's, the product over the sequence, or its geometric mean."""
    cap: float = Field(default=2.0, gt=0)
    """Upper bound of the importance weight (``tis``, ``mis``)."""
    low: float = Field(default=0.5, gt=0)
    """Lower end of the band of ``icepop``."""
    high: float = Field(default=5.0, gt=0)
    """Upper end of the band of ``icepop``."""
    reject: str = ""
    """Rules that drop tokens or sequences besides, separated by commas, each ``name`` or ``name=threshold``:
    ``token_k1``, ``seq_sum_k1``, ``seq_mean_k1`` (bounds of the ratio, ``0.5_2.0``), other ``token_k*`` and ``seq_*``
    of verl, ``veto``, ``opsm``."""


class OptimizerConfig(_Table):
    """AdamW on FP32 master weights."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up; ``linear`` and ``cosine`` fall to 0 over ``steps`` RL steps."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """First moment decay."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Second moment decay."""
    eps: float = Field(default=1e-8, gt=0)
    """Denominator floor."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping by global norm."""


class TrainConfig(_Table):
    """The trainer."""

    prompts: int = Field(default=16, gt=0)
    """Prompts a step."""
    samples: int = Field(default=8, gt=1)
    """Samples a prompt (the GRPO group)."""
    minibatches: int = Field(default=1, gt=0)
    """Optimizer steps a rollout batch is split into."""
    micro_tokens: int = Field(default=16384, gt=0)
    """Padded tokens a micro-batch."""
    gradient_checkpointing: bool = True
    """Recompute each decoder layer in the backward pass: a third more time, a fraction of the memory."""
    cuda_graphs: bool = True
    """Replay the decoder's forward and backward passes as CUDA graphs where that is possible: on one GPU, without
    ``gradient_checkpointing``, for models without recurrent layers."""
    weight_cache: Literal["auto", "widened", "packed"] = "auto"
    """How quantized expert weights are kept between the micro-batches of an optimizer step: ``widened`` to bfloat16, or
    ``packed`` as codes and widened for each layer (a quarter of the memory, more time). ``auto``: packed if sharded."""
    unguided_every: int = Field(default=5, ge=0)
    """Measure the mismatch without guidance, and flip rates, on every n-th step; 0 never."""
    lag: int = Field(default=0, ge=0)
    """Train on the rollouts of n steps ago, as an asynchronous trainer does; the first n steps train nothing."""
    guided_lag: int = Field(default=0, ge=0)
    """Versions behind the trainer up to which rollouts are trained on with guidance; older ones as by ``qat``."""
    replan_every: int = Field(default=50, gt=0)
    """Steps between two choices of a plan ``auto:<bytes>``; at each, one batch is recorded whole."""
    max_lag: int = Field(default=0, ge=0)
    """Weight versions that guidance may be behind the trainer."""
    min_coverage: float = Field(default=0.99, ge=0, le=1)
    """Stop when a smaller share of (token, site) pairs is guided (methods that guide)."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes one at the end only."""
    save_final: bool = True
    """Write a checkpoint when the run ends or is stopped."""
    keep_checkpoints: int = Field(default=1, gt=0)
    """Checkpoints kept."""


class EvalConfig(_Table):
    """Evaluation during and after training: unguided, with the deployed spec."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates before and after training only."""
    items: int = Field(default=128, ge=0)
    """Held-out items; 0 is no evaluation."""
    samples: int = Field(default=1, gt=0)
    """Samples an item."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature."""


class Config(_Table):
    """One run."""

    policy: str = "smollm2-moe"
    """Model name or path."""
    method: str = "trace"
    """How rollout and trainer are quantized: ``bf16``, ``qat``, ``qat_w4a16``, ``qarl``, ``quads``, ``tis_sc``,
    ``trace``."""
    spec: str = "nvfp4-w4a4-kv4"
    """Deployment: formats of weights, activations and KV cache. A suffix leaves the first layers in BF16 on both sides:
    ``nvfp4-w4a4-kv4/b2`` two of them (engine ``embedded``)."""
    numerics: str = "nvfp4-te"
    """Named arithmetic of the FP4 formats."""
    plan: str = "r1-all+mid"
    """Which quantization outcomes of the rollout guide the trainer: ``r1-...`` records bits of the codes, ``c1-...``
    their checks, and pulls bits where one fails (engine ``embedded``). Without ``/s8``, ``/s3`` or ``/s2`` block scales
    travel in the bits that were measured to be enough for its sites. ``auto:<bytes a token>`` chooses by
    measurement, and with it how many first layers stay in BF16, unless ``spec`` ends in ``/b0`` or another number."""
    decoder: Literal["bracket", "nearest", "map", "replay"] = "bracket"
    """How guided rounding reads the recorded bits."""
    key_basis: Literal["plain", "rotated", "centred", "centred-rotated"] = "plain"
    """What is done to keys before they are rounded to FP4: shifted by their mean, turned, both. Engine ``embedded``."""
    engine: str = "embedded"
    """Rollout engine."""
    steps: int = Field(default=100, ge=0)
    """RL steps."""
    max_minutes: float = Field(default=0.0, ge=0)
    """Wall time of the RL loop after which it evaluates and stops, however many steps it made; 0 is no limit."""
    seed: int = 0
    """Seeds data, sampling, upcycling and warm start."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    output_dir: str = "runs/default"
    """Folder of this run."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0 leaves its default."""
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Besides ``metrics.jsonl``, which is always written."""
    task: TaskConfig = TaskConfig()
    """The task."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised warm start."""
    sampling: SamplingConfig = SamplingConfig()
    """Rollout sampling."""
    rollout: EngineConfig = EngineConfig()
    """Engine settings."""
    train: TrainConfig = TrainConfig()
    """Batching and bookkeeping."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    loss: LossConfig = LossConfig()
    """Loss and advantages."""
    correction: CorrectionConfig = CorrectionConfig()
    """Mismatch correction, the same in every arm of a comparison."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of a run in which every step trains something."""
        return self.steps * self.train.minibatches


def load(path: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a TOML file and apply overrides.

    Args:
        path: a TOML file, or ``None`` for the defaults.
        overrides: strings ``a.b=value``; the value is TOML (``true``, ``3``, ``"text"``), a bare word is a string.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value; the message names the key and the nearest valid
            one.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"config file {str(path)!r} does not exist") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from error
    for item in overrides:
        _override(tree, item)
    return parse(tree)


def parse(tree: dict[str, Any]) -> Config:
    """Validate a tree of plain values; raises :class:`ConfigError` with one sentence for the first fault."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from error


def _override(tree: dict[str, Any], item: str) -> None:
    key, separator, text = item.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {item!r} is not of the form a.b=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    node = tree
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {item!r}: {name!r} is a value, not a table")
    node[last] = value


def _sentence(error: ValidationError) -> str:
    fault = error.errors()[0]
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        return f"unknown config key {key!r}{suggest(path[-1], _fields(path[:-1]))}"
    given = fault.get("input")
    return f"config key {key!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}, got {given!r}"


def _fields(path: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in path:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
