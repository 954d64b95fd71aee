"""Engines by name.

``embedded`` is built in; others are found by entry point (group ``tracefp4.engines``), so that neither the RL loop nor a
command imports an engine it does not use. An entry point names a function with the signature of :func:`make_engine`
without its first argument.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from torch import nn

from tracefp4.config import EngineConfig
from tracefp4.errors import ConfigError, suggest
from tracefp4.formats.spec import Spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.store import Store
from tracefp4.rollout.engine import Engine

GROUP = "tracefp4.engines"
"""Entry-point group of engines that other packages bring."""


def make_engine(
    name: str,
    *,
    model: nn.Module,
    tokenizer: Any,
    spec: Spec,
    plan: Plan | None,
    store: Store,
    settings: EngineConfig,
) -> Engine:
    """Build the engine called ``name``.

    Args:
        name: ``embedded`` or an entry point's name.
        model: the engine's own copy of the policy.
        tokenizer: for stop strings.
        spec: what the engine quantizes.
        plan: what it records for guidance; ``None`` records nothing.
        store: where guidance frames go.
        settings: sizes.

    Raises:
        ConfigError: no engine of that name; the message gives the nearest one.
    """
    if name == "embedded":
        from tracefp4.rollout.embedded import EmbeddedEngine

        return EmbeddedEngine(
            model,
            tokenizer,
            spec,
            plan=plan,
            store=store,
            max_tokens=settings.max_tokens,
            page_size=settings.page_size,
            max_batch=settings.max_batch,
            prefill_chunk=settings.prefill_chunk,
            cuda_graphs=settings.cuda_graphs,
        )
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise ConfigError(f"unknown engine {name!r}{suggest(name, ['embedded', *found])}")
    factory = found[name].load()
    return factory(model=model, tokenizer=tokenizer, spec=spec, plan=plan, store=store, settings=settings)
