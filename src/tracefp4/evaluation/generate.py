"""``rollout``: text in, text out, and what the guidance of these tokens weighs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracefp4.config import EngineConfig, TaskConfig
from tracefp4.core import Request, Rollout, SamplingParams
from tracefp4.evaluation.breakdown import breakdown
from tracefp4.evaluation.steps import Steps
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.guidance.file_store import FileStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import WHOLE, Plan
from tracefp4.guidance.sizes import account
from tracefp4.guidance.store import Store
from tracefp4.models.layout import describe
from tracefp4.rl.policies import load_named
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.tasks.base import TaskItem
from tracefp4.rollout.embedded import EmbeddedEngine
from tracefp4.rollout.engine import Engine
from tracefp4.rollout.registry import make_engine


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """What :func:`generate` is asked for; the command's options."""

    model: str
    prompts: tuple[str, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    spec: str = "nvfp4-w4a4-kv4"
    numerics: str = "nvfp4-te"
    plan: str = "auto"
    """``none`` records nothing."""
    samples: int = 1
    engine: str = "embedded"
    device: str = "auto"
    plain: bool = False
    """Take prompts as they are instead of through the chat template."""
    folder: Path | None = None
    """Keep guidance frames here; in memory when ``None``."""
    profile: bool = False
    """Also measure where the time of a decode step goes (:mod:`tracefp4.evaluation.breakdown`)."""


def generate(wanted: GenerateSettings) -> dict[str, Any]:
    """Generate with an engine.

    Returns:
        ``{"model", "spec", "numerics", "plan", "sites", "samples": [...], "guidance", "profile"}``; ``sites`` is
        the number of recorded ones. ``profile`` holds seconds and shares by part, if asked for.
    """
    spec = get_spec(wanted.spec, wanted.numerics)
    loaded = load_named(wanted.model, wanted.device)
    tokenizer: Any = loaded.tokenizer
    layout = describe(loaded.model)
    plan = _plan(wanted, spec, layout.num_layers)
    sites = () if plan is None else plan.select(layout.recordable_shapes(spec), layout.num_layers)
    prompter = _prompter(tokenizer, wanted.plain)
    requests = [
        Request(f"prompt-{i}", prompter.encode(TaskItem(str(i), text)), wanted.samples, wanted.sampling)
        for i, text in enumerate(wanted.prompts)
    ]
    longest = max(len(r.prompt_ids) for r in requests) + wanted.sampling.max_new_tokens
    settings = EngineConfig()
    pages = -(-2 * longest // settings.page_size)  # Samples of one prompt copy its last page.
    settings = settings.model_copy(update={"max_tokens": max(settings.max_tokens, pages * settings.page_size)})
    store: Store = MemoryStore() if wanted.folder is None else FileStore(wanted.folder)
    engine = make_engine(
        wanted.engine,
        model=copy.deepcopy(loaded.model),
        tokenizer=tokenizer,
        spec=spec,
        plan=plan,
        store=store,
        settings=settings,
    )
    with closing(engine):
        engine.sync(dict(loaded.model.named_parameters()), 0)
        rollouts = engine.generate(requests, guidance=plan is not None)
        profile = _profile(engine, rollouts) if wanted.profile else None
    return {
        "model": wanted.model,
        "spec": wanted.spec,
        "numerics": wanted.numerics,
        "plan": "none" if plan is None else str(plan),
        "sites": len(sites),
        "samples": [_sample(rollout, wanted.prompts, prompter) for rollout in rollouts],
        "guidance": None if plan is None else _weight(rollouts, store),
        "profile": profile,
    }


def _profile(engine: Engine, rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    """A step of as many sequences as were generated, as long as the longest, by part; ``None`` for other engines."""
    if not isinstance(engine, EmbeddedEngine):
        return None
    context = max(rollout.rows for rollout in rollouts)
    room = engine.pages.num_pages // engine.pages.pages_for(context)
    batch = min(len(rollouts), engine.scheduler.max_batch, room)
    return breakdown(Steps(engine, batch, context), engine.plan).to_dict()


def _prompter(tokenizer: Any, plain: bool) -> Prompter:
    chat = not plain and getattr(tokenizer, "chat_template", None) is not None
    return Prompter(tokenizer, TaskConfig(options={"prompt": {"style": "chat" if chat else "plain"}}))


def _sample(rollout: Rollout, prompts: Sequence[str], prompter: Prompter) -> dict[str, Any]:
    handle = rollout.guidance
    return {
        "prompt": prompts[int(rollout.request_id.removeprefix("prompt-"))],
        "text": prompter.decode(rollout.response_ids),
        "tokens": len(rollout.response_ids),
        "finish_reason": rollout.finish_reason,
        "mean_logprob": sum(rollout.logprobs) / max(len(rollout.logprobs), 1),
        "guidance": None if handle is None else {"key": handle.key, "bytes": handle.nbytes},
    }


def _weight(rollouts: Sequence[Rollout], store: Store) -> dict[str, Any]:
    """Bytes of all frames, by part."""
    parts: dict[str, int] = {}
    for rollout in rollouts:
        if rollout.guidance is not None:
            for name, size in account(store.get(rollout.guidance)).items():
                parts[name] = parts.get(name, 0) + size
    total = parts.pop("total", 0)
    return {"bytes": total, "bytes_per_token": total / sum(r.rows for r in rollouts), "parts": parts}


def _plan(wanted: GenerateSettings, spec: Spec, num_layers: int) -> Plan | None:
    """``auto`` records every site in one bit, or nothing where the spec has no site to record."""
    if wanted.plan != "auto":
        return Plan.parse(wanted.plan, num_layers, scale_bits=0 if wanted.engine == "embedded" else WHOLE) or None
    return Plan.parse("r1-all+mid/s8") if spec.activations is not None or spec.kv is not None else None
