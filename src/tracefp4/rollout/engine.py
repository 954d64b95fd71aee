"""What every rollout engine offers, embedded or external.

The loop needs few things of an engine: sample a batch, take new weights and prove it, and say what it can record.
Whoever wants more, such as streaming or stopping early, uses the layer below :meth:`Engine.generate`:
:meth:`Engine.add` queues a request, every :meth:`Engine.step` returns what finished in it, :meth:`Engine.abort` gives
up on a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from torch import Tensor

from tracefp4.core import Kind, Request, Rollout
from tracefp4.models.coverage import Coverage
from tracefp4.models.packing import PackedWeight

Digest = str
"""Checksum of the deployed weights: XXH3-128, 32 hex characters (:mod:`tracefp4.models.packing`)."""

Progress = Callable[[int], None]
"""Called with the number of finished rollouts whenever it grows."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; a trainer that needs more refuses it before the first step."""

    name: str
    kinds: frozenset[Kind]
    """Kinds of site whose outcomes it records under its plan."""
    routes: bool
    """Whether rollouts carry expert routes."""
    truncated_sampling: bool
    """Whether it accepts top-k and top-p. Log-probabilities are those of the whole distribution all the same, so a
    trainer refuses such rollouts."""
    stop_strings: bool
    """Whether requests may have stop strings (it has a tokenizer)."""
    cuda_graphs: bool
    """Whether decode steps may run as CUDA graphs."""


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was built."""

    steps: int = 0
    prefill_tokens: int = 0
    """Prompt tokens forwarded, a shared prompt once."""
    shared_tokens: int = 0
    """Prompt tokens that samples got from another one's prefill."""
    decode_tokens: int = 0
    """Tokens forwarded in decode steps."""
    graph_steps: int = 0
    """Decode steps that ran as a CUDA graph."""
    finished: int = 0
    """Rollouts returned, aborted ones not counted."""
    aborted: int = 0
    retractions: int = 0
    """Sequences and prompts that had to give up their pages; their rows were recorded again by a prefill."""
    guidance_bytes: int = 0
    invalid_rows: int = 0
    """Rows of guidance that were shipped as not recorded."""
    syncs: int = 0
    sync_bytes: int = 0
    """Bytes of the weights in all syncs, as they were handed over."""

    def metrics(self) -> dict[str, int]:
        """All counts by name."""
        return {f"engine/{f.name}": getattr(self, f.name) for f in fields(self)}


class Engine(Protocol):
    """A rollout engine."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights it serves.

        Raises:
            SyncError: a weight sync failed and it serves none.
        """
        ...

    @property
    def stats(self) -> EngineStats:
        """Counts since it was built."""
        ...

    def generate(
        self, requests: Sequence[Request], *, guidance: bool = True, progress: Progress | None = None
    ) -> list[Rollout]:
        """Sample all requests.

        Args:
            requests: with different ids.
            guidance: ship guidance with the rollouts, if the engine has a plan.
            progress: called while it goes on.

        Returns:
            Rollouts in the order requests x samples.

        Raises:
            EngineError: a request that can never run, before anything was sampled.
        """
        ...

    def add(self, request: Request, *, guidance: bool = True) -> None:
        """Queue a request. Raises :class:`~tracefp4.errors.EngineError` if it can never run."""
        ...

    def step(self) -> list[Rollout]:
        """Forward one batch; return the rollouts that finished."""
        ...

    def abort(self, request_id: str) -> list[Rollout]:
        """Give up on a request; return its unfinished samples with what they had, without guidance."""
        ...

    def sync(self, state: Mapping[str, Tensor | PackedWeight], version: int) -> Digest:
        """Take new weights.

        Args:
            state: every parameter by name, in the dtype that the engine computes in; an expert weight may come packed,
                and is then served with these codes.
            version: their version.

        Raises:
            SyncError: a tensor is missing, unknown or of another shape or dtype, or requests are in flight. After a
                failed sync the engine refuses to serve until one succeeds.
        """
        ...

    def digest(self) -> Digest:
        """Checksum of the weights it serves."""
        ...

    def coverage(self) -> Coverage:
        """What it quantizes, by module; the trainer compares it with its own before the first step."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...
