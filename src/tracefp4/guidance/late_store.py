"""Frames that wait with their engine until the trainer claims them: ship late, and only what trains.

A group whose rewards are all equal trains nothing, nor does a sample that was filtered out, and this is known only when
the rewards are. Until then a frame need not move, nor even be written: the engine keeps what it gathered and hands over
a :class:`~tracefp4.guidance.store.Pending` frame, of which only the size is known here::

    engine.generate     keep     the handle goes with the rollout, the bytes stay
    rewards, filter     delete   what trains nothing is dropped where it lies
    micro-batch         get      the first look claims the frame: it is fetched once and kept by the inner store
    sync                clear    what nobody claimed is dropped

Every frame ends as claimed or as dropped, and both are counted. Different frames can be claimed at the same time: each
has a lock of its own for as long as it waits, and only what is noted about all of them is changed by one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracefp4.core import Handle, Site
from tracefp4.errors import GuidanceCorrupt, GuidanceError, GuidanceMissing
from tracefp4.guidance.store import Data, Pending, Store, check_key


@dataclass(frozen=True, slots=True)
class Shipping:
    """What became of frames: those that left their engine, those that were dropped there, and what was pulled."""

    claimed: int = 0
    claimed_bytes: int = 0
    dropped: int = 0
    dropped_bytes: int = 0
    pulled_bytes: int = 0
    """Of bits that frames had only checks of."""

    @property
    def saved_share(self) -> float:
        """Share of the frames' bytes that never left the engine; 0 if there were none."""
        return self.dropped_bytes / max(self.claimed_bytes + self.dropped_bytes, 1)


class _Waiting:
    """A frame that waits with its engine."""

    def __init__(self, frame: Pending) -> None:
        self.frame = frame
        self.lock = threading.Lock()
        """Held by whoever claims or drops the frame; taken before the store's."""


class LateStore:
    """A :class:`~tracefp4.guidance.store.Store` that fetches a frame when it is first looked at.

    Safe to use from several threads; a frame is fetched once, and different ones side by side.

    Args:
        inner: keeps what was claimed; its name is the one that handles carry.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._waiting: dict[str, _Waiting] = {}
        self._claimed: set[str] = set()
        self._counts = Shipping()
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        """Name that handles carry."""
        return self._inner.name

    @property
    def nbytes(self) -> int:
        """Bytes kept at the moment, here or with their engine."""
        with self._lock:
            return self._inner.nbytes + sum(waiting.frame.nbytes for waiting in self._waiting.values())

    @property
    def serves_pulls(self) -> bool:
        """Whether the inner store does."""
        return self._inner.serves_pulls

    def put(self, key: str, data: Data) -> Handle:
        """Keep bytes that are here already: a frame that was claimed at once."""
        with self._lock:
            if key in self._waiting:
                raise GuidanceError(f"a frame waits under {key!r} in {self.name!r}; delete it first")
            handle = self._inner.put(key, data)
            if key not in self._claimed:
                self._claim(handle)
        return handle

    def keep(self, key: str, frame: Pending) -> Handle:
        """Note a frame that waits with its engine; nothing is fetched."""
        check_key(key)
        with self._lock:
            if key in self._waiting or key in self._claimed:
                raise GuidanceError(f"{self.name!r} holds a frame under {key!r}; delete it first")
            self._waiting[key] = _Waiting(frame)
        return Handle(self.name, key, frame.nbytes)

    def keep_all(self, frames: Sequence[tuple[str, Pending]]) -> list[Handle]:
        """Note several; nothing is fetched."""
        return [self.keep(key, frame) for key, frame in frames]

    def get(self, handle: Handle) -> memoryview:
        """The bytes of a handle; the first call claims them.

        Raises:
            GuidanceMissing: nothing is kept under this handle, here or with the engine.
            GuidanceCorrupt: another number of bytes than the handle says.
        """
        waiting = self._find(handle)
        if waiting is not None:
            with waiting.lock:
                if self._find(handle) is waiting:  # else somebody was faster
                    self._fetch(handle, waiting.frame)
        return self._inner.get(handle)

    def pull(self, site: Site, wanted: Sequence[tuple[Handle, np.ndarray]]) -> Sequence[np.ndarray]:
        """Bits that claimed frames have only checks of, counted; see :class:`~tracefp4.guidance.store.Store`."""
        found = self._inner.pull(site, wanted)
        nbytes = sum(bits.nbytes for bits in found)
        with self._lock:
            self._counts = replace(self._counts, pulled_bytes=self._counts.pulled_bytes + nbytes)
        return found

    def delete(self, handle: Handle) -> None:
        """Forget a frame; one that still waits is dropped where it lies, and counted."""
        waiting = self._find(handle)
        if waiting is None or not self._drop(handle.key, waiting):
            with self._lock:
                self._inner.delete(handle)
                self._claimed.discard(handle.key)

    def keys(self) -> tuple[str, ...]:
        """Keys at the moment, waiting ones included, sorted."""
        with self._lock:
            return tuple(sorted((*self._inner.keys(), *self._waiting)))

    def clear(self) -> None:
        """Forget every frame; those that still wait are dropped where they lie, and counted."""
        self._drop_all()
        with self._lock:
            self._claimed.clear()
            self._inner.clear()

    def close(self) -> None:
        """Drop what waits and close the inner store. Closing twice is harmless."""
        self._drop_all()
        with self._lock:
            self._claimed.clear()
            self._inner.close()

    def counts(self) -> Shipping:
        """What became of frames since the last call; those that still wait are not in it."""
        with self._lock:
            found, self._counts = self._counts, Shipping()
        return found

    def _find(self, handle: Handle) -> _Waiting | None:
        if handle.store != self.name:
            raise GuidanceMissing(f"{handle.key!r} lies in store {handle.store!r}, this is {self.name!r}")
        with self._lock:
            return self._waiting.get(handle.key)

    def _fetch(self, handle: Handle, frame: Pending) -> None:
        """Take a waiting frame, whose lock is held, from its engine."""
        data = frame.take()
        if len(data) != handle.nbytes:
            raise GuidanceCorrupt(
                f"the engine gave {len(data)} bytes for {handle.key!r}, its handle says {handle.nbytes}"
            )
        with self._lock:
            self._inner.keep(handle.key, replace(frame, take=lambda: data))
            del self._waiting[handle.key]
            self._claim(handle)

    def _claim(self, handle: Handle) -> None:
        self._claimed.add(handle.key)
        old = self._counts
        self._counts = replace(old, claimed=old.claimed + 1, claimed_bytes=old.claimed_bytes + handle.nbytes)

    def _drop(self, key: str, waiting: _Waiting) -> bool:
        """Drop a frame where it lies; ``False`` if it waits no more."""
        with waiting.lock, self._lock:
            if self._waiting.get(key) is not waiting:
                return False
            del self._waiting[key]
            waiting.frame.drop()
            old, nbytes = self._counts, waiting.frame.nbytes
            self._counts = replace(old, dropped=old.dropped + 1, dropped_bytes=old.dropped_bytes + nbytes)
            return True

    def _drop_all(self) -> None:
        with self._lock:
            waiting = list(self._waiting.items())
        for key, frame in waiting:
            self._drop(key, frame)
