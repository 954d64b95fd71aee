"""``rollout``: text in, text out, and what the guidance of these tokens weighs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracefp4.config import EngineConfig, TaskConfig
from tracefp4.core import Request, SamplingParams
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.file_store import FileStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.models.layout import describe
from tracefp4.models.loading import load_model
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.setup import resolve_device
from tracefp4.rl.tasks.base import TaskItem
from tracefp4.rollout.registry import make_engine


def generate(
    model: str,
    prompts: Sequence[str],
    sampling: SamplingParams,
    *,
    spec: str,
    numerics: str,
    plan: str,
    samples: int,
    device: str,
    plain: bool,
    folder: Path | None,
) -> dict[str, Any]:
    """Generate with the embedded engine.

    Args:
        model: name or path.
        prompts: texts.
        sampling: temperature, truncation, length, stops, seed.
        spec: deployment.
        numerics: arithmetic of the FP4 formats.
        plan: guidance to record; ``none`` records nothing.
        samples: samples a prompt.
        device: ``auto``, ``cpu``, ``cuda``.
        plain: take prompts as they are instead of through the chat template.
        folder: keep guidance frames here; in memory when ``None``.

    Returns:
        ``{"model", "spec", "plan", "samples": [...], "guidance": {...} or None}``.
    """
    where = resolve_device(device)
    loaded = load_model(model, device=where)
    deployed, recorded = get_spec(spec, numerics), None if plan == "none" else Plan.parse(plan)
    store = MemoryStore() if folder is None else FileStore(folder)
    chat = not plain and getattr(loaded.tokenizer, "chat_template", None) is not None
    style = {"prompt": {"style": "chat" if chat else "plain"}}
    prompter = Prompter(loaded.tokenizer, TaskConfig(options=style))
    requests = [
        Request(f"prompt-{i}", prompter.encode(TaskItem(str(i), text)), samples, sampling) for i, text in enumerate(prompts)
    ]
    longest = max(len(r.prompt_ids) for r in requests) + sampling.max_new_tokens
    settings = EngineConfig(max_tokens=max(16384, 2 * longest))
    shapes = describe(loaded.model).site_shapes(deployed)
    engine = make_engine(
        "embedded", model=loaded.model, tokenizer=loaded.tokenizer, spec=deployed, plan=recorded, store=store, settings=settings
    )
    engine.sync(dict(loaded.model.named_parameters()), 0)
    rollouts = engine.generate(requests, guidance=recorded is not None)
    rows = [
        {
            "prompt": prompts[int(r.request_id.removeprefix("prompt-"))],
            "text": loaded.tokenizer.decode(list(r.response_ids), skip_special_tokens=True),
            "tokens": len(r.response_ids),
            "finish_reason": r.finish_reason,
            "mean_logprob": sum(r.logprobs) / max(len(r.logprobs), 1),
            "guidance": None if r.guidance is None else {"key": r.guidance.key, "bytes": r.guidance.nbytes},
        }
        for r in rollouts
    ]
    found = {"model": model, "spec": spec, "numerics": numerics, "plan": plan, "samples": rows, "guidance": None}
    if recorded is not None:
        from tracefp4.guidance.sizes import account

        frames = [store.get(r.guidance) for r in rollouts if r.guidance is not None]
        parts: dict[str, int] = {}
        for frame in frames:
            for name, size in account(frame).items():
                parts[name] = parts.get(name, 0) + size
        total = sum(r.guidance.nbytes for r in rollouts if r.guidance is not None)
        found["guidance"] = {"bytes": total, "bytes_per_token": total / sum(r.rows for r in rollouts), "parts": parts}
        found["sites"] = len(recorded.select(shapes, describe(loaded.model).num_layers))
    return found
