"""Bytes from the engine's process to the trainer's: a message carries a handle, the bytes lie in a shared folder.

The engine's process is the folder's writer (:class:`~tracefp4.guidance.file_store.FileStore`: whole files under their
final names or none). The trainer's process *takes*: it maps a file and removes its name, so that the bytes live exactly
as long as somebody looks at them, and a folder that a run left empty proves that nothing was forgotten. A frame may
stay in the folder until it is claimed, and is removed unread if nobody does. On Linux the folder lies in shared memory
(``/dev/shm``) unless told otherwise, so taking costs no copy.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tracefp4.core import Handle
from tracefp4.errors import GuidanceCorrupt, GuidanceMissing
from tracefp4.guidance.file_store import SUFFIX, FileStore
from tracefp4.guidance.store import Pending, Store

_SHARED = Path("/dev/shm")
_ROUTE_DTYPES = {"uint8": torch.uint8, "int16": torch.int16}


class Folder:
    """A folder of frames and routes between two processes; made, and in the end removed, by the trainer's.

    Args:
        parent: where to make it; ``None`` for shared memory where there is some, else the temporary folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        where = parent if parent is not None else _SHARED if _SHARED.is_dir() else None
        self.path = Path(tempfile.mkdtemp(prefix="tracefp4-", dir=where))
        self.frames = self.path / "frames"
        """What the engine's store writes to."""
        self.frames.mkdir(mode=0o700)
        self._store: FileStore | None = None
        self._lock = threading.Lock()

    def take(self, handle: Handle) -> memoryview:
        """Map the bytes of a handle and remove its file.

        Raises:
            GuidanceMissing: it is not there.
            GuidanceCorrupt: another number of bytes.
        """
        with self._lock:  # several frames may be taken at once
            if self._store is None:
                self._store = FileStore(self.frames, read_only=True)
        data = self._store.get(handle)
        (self.frames / (handle.key + SUFFIX)).unlink()
        return data

    def drop(self, handle: Handle) -> None:
        """Remove the file of a handle unread. Raises :class:`GuidanceMissing` if it is not there."""
        try:
            (self.frames / (handle.key + SUFFIX)).unlink()
        except FileNotFoundError:
            raise GuidanceMissing(f"no guidance under {handle.key!r} in {str(self.frames)!r}") from None

    def offer(self, handle: Handle, store: Store) -> Handle:
        """Let ``store`` keep the bytes of a handle under the same key: it takes them now, or when they are wanted."""
        return store.keep(handle.key, Pending(handle.nbytes, partial(self.take, handle), partial(self.drop, handle)))

    def leftovers(self) -> tuple[str, ...]:
        """Names of files that nobody has taken."""
        return tuple(sorted(path.name for path in self.frames.glob(f"*{SUFFIX}")))

    def remove(self) -> None:
        """Remove the folder with everything in it; again is harmless."""
        if self._store is not None:
            self._store.close()
            self._store = None
        shutil.rmtree(self.path, ignore_errors=True)


def put_routes(store: Store, key: str, routes: Tensor) -> tuple[Handle, tuple[int, ...], str]:
    """Put routes ``(rows, moe_layers, top_k)`` under ``key``; returns what :func:`read_routes` needs."""
    data = routes.contiguous().numpy().tobytes()
    return store.put(key, data), tuple(routes.shape), str(routes.dtype).removeprefix("torch.")


def read_routes(data: memoryview, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Routes out of their bytes, copied.

    Raises:
        GuidanceCorrupt: the bytes are not of that shape and dtype.
    """
    if dtype not in _ROUTE_DTYPES or len(data) != np.prod(shape) * np.dtype(dtype).itemsize:
        raise GuidanceCorrupt(f"{len(data)} bytes are no routes of shape {shape} and dtype {dtype!r}")
    return torch.from_numpy(np.frombuffer(data, dtype=dtype).reshape(shape).copy())
