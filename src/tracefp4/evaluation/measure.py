"""``measure``: how far apart rollout and trainer are on a given model, and what each plan of guidance would change.

One engine generates with FP4 and records whole codes (4 bits, every site); a second one generates in BF16. Then the
same tokens are scored by one trainer after another:

``bf16_floor``   BF16 rollout, BF16 trainer: what two correct bfloat16 paths differ by
``fp4_vs_bf16``  FP4 rollout, BF16 trainer: quantization on one side only
``qat``          FP4 rollout, FP4 trainer with its own roundings
``guided``       FP4 rollout, FP4 trainer guided by a plan; lower-bit plans are cut from the recorded whole codes

Expert routes are replayed in every row unless it says otherwise, so routing is not what differs. Intervals resample
prompts, because tokens of one prompt are not independent.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from tracefp4 import config as settings
from tracefp4.config import EngineConfig
from tracefp4.core import Request, Rollout, SamplingParams, SiteShape
from tracefp4.errors import ConfigError
from tracefp4.evaluation.chosen import Chooser
from tracefp4.evaluation.gauge import Gauge
from tracefp4.evaluation.rows import Measurement
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.guidance import frame
from tracefp4.guidance.auto import LARGEST, budget_of
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import WHOLE, Plan
from tracefp4.guidance.record import Record
from tracefp4.models.directory import LoadedModel
from tracefp4.models.layout import describe
from tracefp4.rl.collect import make_requests
from tracefp4.rl.policies import load_named
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.setup import check_decoder, resolve_device
from tracefp4.rl.tasks import make_task
from tracefp4.rollout.registry import make_engine

FULL_PLAN = "r4-all+mid/s8"
"""Everything that can be recorded; every other plan is a part of it."""

DEFAULT_ROWS: tuple[tuple[str, str], ...] = (
    ("r4-all+mid/s8", "replay"),
    ("r4-all+mid/s8", "bracket"),
    ("r3-all+mid/s8", "bracket"),
    ("r2-all+mid/s8", "bracket"),
    ("r1-all+mid/s8", "bracket"),
    ("r1-all+mid/s8", "nearest"),
    ("r1-all+mid/s8", "map"),
    ("r1-all+mid/s3", "bracket"),
    ("r1-all+mid/s2", "bracket"),
    ("r1-all/s8", "bracket"),
    ("r2-all/s8", "bracket"),
    ("r1-all:kv", "bracket"),
    ("r1-half", "bracket"),
)
"""Plan and decoder of each guided row; ``half`` is the paper's depth."""

DEFAULT_TASK = {
    "kind": "reasoning_gym",
    "name": "measure",
    "options": {
        "generators": [
            {"name": name} for name in ("chain_sum", "basic_arithmetic", "letter_counting", "number_sorting")
        ],
        "prompt": {"style": "chat"},
    },
}
"""Prompts of a measurement that names no task."""

CHOOSING_PROMPTS = 8
"""Prompts that a plan ``auto:<bytes>`` is chosen on; the rows are measured on others."""


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """What :func:`measure` is asked for; the command's options."""

    model: str
    spec: str = "nvfp4-w4a4-kv4"
    numerics: str = "nvfp4-te"
    plans: tuple[str, ...] = ()
    """``plan`` or ``plan@decoder``; empty for :data:`DEFAULT_ROWS`. ``auto:<bytes>`` chooses one on other prompts."""
    prompts: int = 64
    samples: int = 2
    max_new_tokens: int = 96
    max_batch: int = 16
    """Sequences decoded at once. Large batches run the kernels of a training forward, and hide the gap."""
    temperature: float = 1.0
    task: str | None = None
    own_routes: bool = False
    micro_tokens: int = 8192
    engine: str = "embedded"
    device: str = "auto"
    seed: int = 0


def measure(wanted: MeasureSettings, note: Callable[[str], None] = lambda _: None) -> Measurement:
    """Generate with an FP4 and a BF16 engine and score their tokens with one trainer after another.

    Args:
        wanted: model, spec, plans, sizes.
        note: called with a line whenever something is done.

    Raises:
        ConfigError: a plan that is unknown, or selects no site of this model and spec; before anything is generated.
    """
    device = resolve_device(wanted.device)
    loaded = load_named(wanted.model, wanted.device)
    spec = get_spec(wanted.spec, wanted.numerics)
    layout = describe(loaded.model)
    plans = _plans(wanted, layout.recordable_shapes(spec), layout.num_layers, note)
    choosing = CHOOSING_PROMPTS if any(isinstance(plan, int) for plan, _ in plans) else 0
    requests = _requests(wanted, loaded, choosing)
    bf16 = get_spec("bf16")
    sampled = {
        one.name: _generate(loaded, one, plan, requests, wanted, note)
        for one, plan in ((spec, Plan.parse(FULL_PLAN)), (bf16, None))
    }
    rollouts, truth = sampled[spec.name]
    apart = len(rollouts) - wanted.prompts * wanted.samples
    others, rollouts = (rollouts[:apart], truth[:apart]), rollouts[apart:]
    truth = truth[apart:]
    tokens = sum(len(r.response_ids) for r in rollouts)
    gauge = Gauge(loaded.model, spec, temperature=wanted.temperature, micro_tokens=wanted.micro_tokens, note=note)
    gauge.floor(sampled[bf16.name][0][apart:])
    gauge.unguided(rollouts, truth)
    chooser = Chooser(
        wanted.spec,
        wanted.numerics,
        wanted.engine,
        gauge,
        requests[:choosing],
        requests[choosing:],
        lambda one, some: _generate(loaded, one, Plan.parse(FULL_PLAN), some, wanted, note),
        (others, (rollouts, truth)),
        note,
    )
    for plan, decoder in plans:
        if isinstance(plan, int):
            choice = chooser.choose(plan)
            note(f"auto:{plan}: {choice}")
            layers = choice.bf16_layers
            chooser.gauge(layers).guided(*chooser.measured(layers), choice.plan, decoder)
        else:
            gauge.guided(rollouts, truth, plan, decoder)
    if wanted.own_routes:
        gauge.unguided(rollouts, truth, replay=False)
        gauge.guided(rollouts, truth, Plan.parse("r1-all+mid/s8"), "bracket", replay=False)
    return Measurement(
        model=wanted.model,
        spec=spec.name,
        numerics=wanted.numerics,
        device=_device_name(device),
        engine=wanted.engine,
        tokens=tokens,
        prompts=wanted.prompts,
        rows=gauge.rows,
        sites=gauge.sites,
    )


def _requests(wanted: MeasureSettings, loaded: LoadedModel, choosing: int) -> list[Request]:
    """Prompts of a task's training split; by default simple reasoning problems of several kinds.

    ``choosing`` other ones come first, each sampled once: plans are chosen on them.
    """
    tree = settings.load(wanted.task) if wanted.task else settings.parse({"task": DEFAULT_TASK})
    task = make_task(tree.task)
    sampling = SamplingParams(temperature=wanted.temperature, max_new_tokens=wanted.max_new_tokens)
    items = task.items("train", wanted.prompts, ("measure", wanted.seed))
    apart = task.items("train", choosing, ("choose", wanted.seed)) if choosing else []
    tokenizer: Any = loaded.tokenizer
    prompter = Prompter(tokenizer, tree.task)
    task.close()
    first = make_requests(apart, prompter, sampling, 1, wanted.seed, "choose")
    return first + make_requests(items, prompter, sampling, wanted.samples, wanted.seed, "measure")


def _generate(
    loaded: LoadedModel,
    spec: Spec,
    plan: Plan | None,
    requests: Sequence[Request],
    wanted: MeasureSettings,
    note: Callable[[str], None],
) -> tuple[list[Rollout], list[Record]]:
    store = MemoryStore()
    longest = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
    slots = (wanted.max_batch + 2) * (longest + 32)
    engine = make_engine(
        wanted.engine,
        model=copy.deepcopy(loaded.model),
        tokenizer=loaded.tokenizer,
        spec=spec,
        plan=plan,
        store=store,
        settings=EngineConfig(max_tokens=-(-slots // 16) * 16, page_size=16, max_batch=wanted.max_batch),
    )
    with closing(engine):
        engine.sync(dict(loaded.model.named_parameters()), 0)
        start = time.monotonic()
        rollouts = engine.generate(requests, guidance=plan is not None)
        seconds = time.monotonic() - start
    # An engine and its site objects refer to each other: its copy of the weights would stay while trainers score.
    del engine
    gc.collect()
    tokens = sum(len(r.response_ids) for r in rollouts)
    note(f"{spec.name}: {tokens} response tokens in {seconds:.1f} s ({tokens / seconds:.0f} a second)")
    if plan is None:
        return rollouts, []
    return rollouts, [frame.decode(store.get(r.guidance)) for r in rollouts if r.guidance is not None]


def _plans(
    wanted: MeasureSettings, shapes: Sequence[SiteShape], num_layers: int, note: Callable[[str], None]
) -> list[tuple[Plan | int, str]]:
    """The plans asked for, or those default ones that select something under this spec; bytes for one to be chosen."""
    Plan.parse(FULL_PLAN).select(shapes, num_layers)
    asked = [(plan, decoder or "bracket") for plan, _, decoder in (text.partition("@") for text in wanted.plans)]
    rows: list[tuple[Plan | int, str]] = []
    for name, decoder in asked or DEFAULT_ROWS:
        budget = budget_of(name)
        if budget is not None:
            check_decoder(LARGEST, decoder)
            rows.append((budget, decoder))
            continue
        # Of an engine with kernels of its own nobody knows how near its scales are.
        plan = Plan.parse(name, num_layers, scale_bits=0 if wanted.engine == "embedded" else WHOLE)
        try:
            plan.select(shapes, num_layers)
        except ConfigError:
            if asked:
                raise
            note(f"guided {name} {decoder}: left out, spec {wanted.spec} has no such site")
            continue
        check_decoder(plan, decoder)
        rows.append((plan, decoder))
    return rows


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
