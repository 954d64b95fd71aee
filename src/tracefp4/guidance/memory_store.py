"""Frames in the memory of one process: what an embedded engine and its trainer share."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from tracefp4.core import Handle, Site
from tracefp4.errors import GuidanceCorrupt, GuidanceError, GuidanceMissing
from tracefp4.guidance.store import Data, Pending, Source, check_key, pull_from
from tracefp4.guidance.workers import side_by_side


class MemoryStore:
    """A :class:`~tracefp4.guidance.store.Store` in this process, safe to use from several threads.

    ``bytes`` are kept as they are, and so are read-only views that an engine hands over; anything that its owner could
    still change is copied.

    Args:
        name: what handles carry.
        max_bytes: refuse more than this in total; ``None`` for no limit.
    """

    def __init__(self, name: str = "memory", max_bytes: int | None = None) -> None:
        self._name, self._max_bytes = name, max_bytes
        self._frames: dict[str, bytes | memoryview] = {}
        self._sources: dict[str, Source] = {}
        self._nbytes = 0
        self._open = True
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name that handles carry."""
        return self._name

    @property
    def nbytes(self) -> int:
        """Bytes kept at the moment."""
        return self._nbytes

    @property
    def serves_pulls(self) -> bool:
        """The engine is in this process."""
        return True

    def put(self, key: str, data: Data) -> Handle:
        """Keep ``data`` under ``key``; see :meth:`Store.put <tracefp4.guidance.store.Store.put>`."""
        return self._put(key, data if isinstance(data, bytes) else bytes(data))

    def keep(self, key: str, frame: Pending) -> Handle:
        """Take a frame from its engine at once, and keep it."""
        return self._put(key, _own(frame.take()), frame.source)

    def keep_all(self, frames: Sequence[tuple[str, Pending]]) -> list[Handle]:
        """Take frames side by side, and keep them in this order."""
        taken = side_by_side([frame.take for _, frame in frames])
        return [self._put(key, _own(data), frame.source) for (key, frame), data in zip(frames, taken, strict=True)]

    def _put(self, key: str, frame: bytes | memoryview, source: Source | None = None) -> Handle:
        """Keep what nobody can change."""
        check_key(key)
        if not frame:
            raise GuidanceError(f"no bytes to keep under {key!r}")
        with self._lock:
            self._check_open()
            known = self._frames.get(key)
            if known is not None and known != frame:
                raise GuidanceError(f"{self._name!r} holds other bytes under {key!r}; delete them first")
            if known is None:
                self._check_room(key, len(frame))
                self._frames[key] = frame
                self._nbytes += len(frame)
                if source is not None:
                    self._sources[key] = source
        return Handle(self._name, key, len(frame))

    def get(self, handle: Handle) -> memoryview:
        """The bytes of a handle; see :meth:`Store.get <tracefp4.guidance.store.Store.get>`."""
        with self._lock:
            frame = self._find(handle)
        if len(frame) != handle.nbytes:
            raise GuidanceCorrupt(
                f"{handle.key!r} in {self._name!r} has {len(frame)} bytes, its handle says {handle.nbytes}"
            )
        return memoryview(frame)

    def pull(self, site: Site, wanted: Sequence[tuple[Handle, np.ndarray]]) -> list[np.ndarray]:
        """Bits that frames have only checks of; see :meth:`Store.pull <tracefp4.guidance.store.Store.pull>`."""
        with self._lock:
            sources = [self._source(handle) for handle, _ in wanted]
        return pull_from(site, zip(sources, (rows for _, rows in wanted), strict=True))

    def delete(self, handle: Handle) -> None:
        """Forget a frame."""
        with self._lock:
            self._nbytes -= len(self._find(handle))
            del self._frames[handle.key]
            self._sources.pop(handle.key, None)

    def keys(self) -> tuple[str, ...]:
        """Keys at the moment, sorted."""
        with self._lock:
            self._check_open()
            return tuple(sorted(self._frames))

    def clear(self) -> None:
        """Forget every frame."""
        with self._lock:
            self._check_open()
            self._frames.clear()
            self._sources.clear()
            self._nbytes = 0

    def close(self) -> None:
        """Forget everything and refuse later calls. Closing twice is harmless."""
        with self._lock:
            self._frames.clear()
            self._sources.clear()
            self._nbytes, self._open = 0, False

    def _find(self, handle: Handle) -> bytes | memoryview:
        self._check_open()
        if handle.store != self._name:
            raise GuidanceMissing(f"{handle.key!r} lies in store {handle.store!r}, this is {self._name!r}")
        if handle.key not in self._frames:
            raise GuidanceMissing(f"no guidance under {handle.key!r} in {self._name!r} ({len(self._frames)} frames)")
        return self._frames[handle.key]

    def _source(self, handle: Handle) -> Source:
        self._find(handle)
        source = self._sources.get(handle.key)
        if source is None:
            raise GuidanceMissing(f"{handle.key!r} in {self._name!r} came without bits to pull")
        return source

    def _check_open(self) -> None:
        if not self._open:
            raise GuidanceError(f"store {self._name!r} is closed")

    def _check_room(self, key: str, size: int) -> None:
        if self._max_bytes is not None and self._nbytes + size > self._max_bytes:
            raise GuidanceError(
                f"no room for {size} bytes under {key!r} in {self._name!r}: {self._nbytes} of {self._max_bytes} used"
            )


def _own(data: Data) -> bytes | memoryview:
    """What an engine handed over, as bytes that nobody can change."""
    if isinstance(data, memoryview) and data.readonly:
        return data.cast("B")
    return data if isinstance(data, bytes) else bytes(data)
