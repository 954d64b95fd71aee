"""Where the time of a rollout goes: the model's forward pass, dequantizing the KV cache, recording guidance.

The embedded engine has a few seams between these parts. For the length of a ``with`` block each seam's method is timed,
waiting for the device before and after, and a part that runs within another is subtracted from it::

    kv_dequantization   gathering FP4 codes of the context and decoding them, once a layer and step
    wa_guidance         writing the experts' outcomes beside the KV slots, and gathering them at the end of a sequence
    kv_guidance         reading codes and scales of K and V at the end of a sequence
    frames              packing them, and everything else between gathered rows and bytes in the store
    forward             the rest: the model, the sampler, the scheduler

Waiting makes a step slower than it is, most of all on a GPU, where the parts would overlap. Shares are comparable with
each other; the throughput of such a run is not that of the engine. Steps must not be replayed as CUDA graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tracefp4.errors import EngineError
from tracefp4.rollout.embedded import EmbeddedEngine

PARTS = ("forward", "kv_dequantization", "wa_guidance", "kv_guidance", "frames")
"""Parts in the order in which they are shown."""


@dataclass(slots=True)
class Profile:
    """Seconds by part."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    stack: list[float] = field(default_factory=list)
    """Time spent in parts within each part that is running."""

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its own time counted for ``part``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = _now()
            self.stack.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = _now() - start
                self.seconds[part] += whole - self.stack.pop()
                if self.stack:
                    self.stack[-1] += whole

        return call

    def to_dict(self) -> dict[str, Any]:
        """Seconds and shares for JSON."""
        total = sum(self.seconds.values())
        return {"seconds": self.seconds, "shares": {k: v / max(total, 1e-12) for k, v in self.seconds.items()}}


@contextmanager
def profiled(engine: EmbeddedEngine) -> Iterator[Profile]:
    """Time an engine's parts for the length of a ``with`` block.

    Raises:
        EngineError: it runs CUDA graphs, whose replays call nothing that could be timed.
    """
    if engine.capabilities.cuda_graphs:
        raise EngineError("a profile needs an engine without CUDA graphs; build it with cuda_graphs = False")
    profile, harvester = Profile(), engine._harvester
    seams: list[tuple[Any, str, str]] = [
        (engine, "step", "forward"),
        (engine.pool, "read", "kv_dequantization"),
        (engine.capture, "write", "wa_guidance"),
        (engine.capture, "read", "wa_guidance"),
        (engine.pool, "stored", "kv_guidance"),
        (harvester, "collect", "frames"),
    ]
    for owner, name, part in seams:
        setattr(owner, name, profile.timed(part, getattr(owner, name)))
    try:
        yield profile
    finally:
        for owner, name, _ in seams:
            delattr(owner, name)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
