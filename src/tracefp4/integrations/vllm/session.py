"""What this process records with, found by vLLM's layers without being handed it.

vLLM builds its layers itself and serves one model a process, so the recorder is a fact of the process. It exists from
the moment the worker was asked to attach it, when the KV cache has its size; whatever is forwarded before has nothing
to be recorded with, and is an error of the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tracefp4.errors import EngineError
from tracefp4.guidance.store import Store
from tracefp4.integrations.engines.experts import EmulatedExperts
from tracefp4.integrations.engines.recorder import Collected, Recorder
from tracefp4.integrations.engines.weights import Names
from tracefp4.integrations.engines.wire import SiteLine
from tracefp4.integrations.vllm.plugin import WORKER
from tracefp4.models.packing import PackedWeight

Carried = Literal["connector", "rows"]
"""How rows leave the model's process; see :mod:`tracefp4.integrations.vllm.attach`."""


@dataclass(slots=True)
class Session:
    """One attached engine."""

    recorder: Recorder
    store: Store
    """Where the connector puts frames and routes; nothing enters it if rows leave by the side channel."""
    block_size: int
    """Tokens a block of vLLM's KV cache."""
    names: Names
    """Of the trainer's tensors."""
    carried: Carried = "connector"
    """How rows leave this process."""
    experts: Mapping[int, EmulatedExperts | None] = field(default_factory=dict)
    """By layer; ``None`` where vLLM's own kernels compute them."""
    sites: list[SiteLine] = field(default_factory=list)
    """The capability table of what runs."""
    collected: dict[str, tuple[Collected, int]] = field(default_factory=dict)
    """Rows of finished requests by key, and how often each had been preempted, until the host takes them."""

    def packed(self) -> dict[tuple[int, str], PackedWeight]:
        """Packed expert weights by layer and projection."""
        emulated = {layer: experts for layer, experts in self.experts.items() if experts is not None}
        return {(layer, name): weight for layer, e in emulated.items() for name, weight in e.packed.items()}

    def layers(self) -> list[int]:
        """Layers whose experts hand their inputs to the recorder."""
        return sorted(self.experts)


_installed: list[Session] = []


def install(found: Session | None) -> None:
    """Make ``found`` the session of this process; ``None`` takes it off."""
    _installed[:] = [] if found is None else [found]


def installed() -> Session | None:
    """The session of this process, ``None`` before there is one."""
    return _installed[0] if _installed else None


def session() -> Session:
    """The session of this process.

    Raises:
        EngineError: none was attached.
    """
    if not _installed:
        raise EngineError(
            f"vLLM runs a tracefp4 model without a recorder: start it with worker_extension_cls={WORKER!r} and call "
            "tracefp4_attach on its worker"
        )
    return _installed[0]


def recorder() -> Recorder:
    """The recorder of this process; see :func:`session`."""
    return session().recorder
