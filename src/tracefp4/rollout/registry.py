"""Engines by name.

``embedded`` is ours. Others are found by entry point, so that this package never imports them: a plugin declares in the
group ``tracefp4.engines`` a function that takes the arguments of :func:`make_engine` and returns an
:class:`~tracefp4.rollout.engine.Engine`.
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
"""Entry point group of external engines."""


def engine_names() -> tuple[str, ...]:
    """Names that :func:`make_engine` accepts here."""
    return ("embedded", *sorted(point.name for point in entry_points(group=GROUP)))


def make_engine(
    name: str,
    *,
    model: nn.Module,
    tokenizer: Any,
    spec: Spec,
    plan: Plan | None,
    store: Store | None,
    settings: EngineConfig,
) -> Engine:
    """Build an engine.

    Args:
        name: one of :func:`engine_names`.
        model: a copy of the model for the engine to keep.
        tokenizer: of the model, or ``None``.
        spec: what is quantized.
        plan: what is recorded, or ``None``.
        store: where guidance goes.
        settings: sizes.

    Raises:
        ConfigError: no such engine is installed, options for an engine that takes none, or states in another dtype for
            an engine that keeps its own.
    """
    if name == "embedded":
        from tracefp4.rollout.embedded import EmbeddedEngine

        if settings.options:
            raise ConfigError(f"engine 'embedded' takes no rollout.options, got {', '.join(settings.options)}")
        # How weights are sent is the trainer's business; the engine takes them either way.
        return EmbeddedEngine(model, tokenizer, spec, plan, store, **settings.model_dump(exclude={"options", "refit"}))
    for point in entry_points(group=GROUP):
        if point.name == name:
            if settings.state_dtype != "float32":
                raise ConfigError(f"rollout.state_dtype is for the embedded engine alone; engine {name!r} has its own")
            return point.load()(model=model, tokenizer=tokenizer, spec=spec, plan=plan, store=store, settings=settings)
    raise ConfigError(
        f"unknown engine {name!r}{suggest(name, engine_names())}; engines of other packages are found by entry point"
    )
