"""What every engine does that works in steps: sample a batch with them, and name the weights it serves.

The layer below (:meth:`add`, :meth:`step`) is each engine's own; what :meth:`generate` makes of it is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack

from tracefp4.core import Request, Rollout
from tracefp4.errors import EngineError, SyncError
from tracefp4.rollout.engine import Progress


class StepwiseEngine(ABC):
    """Base of engines that queue requests and work in steps. See :class:`tracefp4.rollout.engine.Engine`."""

    _version: int | None
    """``None`` after a sync that failed."""

    @property
    def weight_version(self) -> int:
        """Version of the weights it serves; 0 for those it was built with.

        Raises:
            SyncError: the last sync failed.
        """
        if self._version is None:
            raise SyncError(
                "the last weight sync failed: the engine may hold a mixture of weights and serves nothing; sync again"
            )
        return self._version

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether requests are in flight."""

    @abstractmethod
    def add(self, request: Request, *, guidance: bool = True) -> None:
        """Queue a request."""

    @abstractmethod
    def step(self) -> list[Rollout]:
        """Work a moment; return the rollouts that finished."""

    @abstractmethod
    def _check(self, request: Request) -> None:
        """Refuse a request that can never run."""

    @abstractmethod
    def _drop_everything(self) -> None:
        """Give up on all that is in flight."""

    def generate(
        self, requests: Sequence[Request], *, guidance: bool = True, progress: Progress | None = None
    ) -> list[Rollout]:
        """Sample all requests; see :meth:`tracefp4.rollout.engine.Engine.generate`."""
        if self.busy:
            raise EngineError(
                "requests that were added one by one are in flight; step until they finish, or abort them"
            )
        for request in requests:
            self._check(request)
        found: dict[tuple[str, int], Rollout] = {}
        with ExitStack() as undo:
            undo.callback(self._drop_everything)
            for request in requests:
                self.add(request, guidance=guidance)
            while self.busy:
                finished = self.step()
                found |= {(rollout.request_id, rollout.sample): rollout for rollout in finished}
                if progress is not None and finished:
                    progress(len(found))
            undo.pop_all()
        return [found[request.id, sample] for request in requests for sample in range(request.samples)]
