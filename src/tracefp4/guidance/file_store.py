"""Frames as files in one directory: what an engine and trainers in several processes share on one machine.

One process writes, any number read. The writer holds a lock on the directory for as long as its store is open, so two
runs never mix their frames. A frame appears under its name in one step (written to a temporary file, flushed, renamed
within the directory), so a reader sees the whole frame or none, and a writer that dies or finds the disk full leaves
the old frames as they were. Readers map files instead of copying them; a mapping outlives the deletion of its file.

Only regular files whose names are keys with the suffix ``.guidance`` count as frames. Links are not followed. Whatever
else lies in the directory is never read or deleted: temporary files of a dead writer are reported by
:attr:`FileStore.leftovers`, other files by :attr:`FileStore.foreign`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tracefp4.core import Handle, Site
from tracefp4.errors import GuidanceCorrupt, GuidanceError, GuidanceMissing
from tracefp4.guidance.store import Data, Pending, check_key
from tracefp4.guidance.workers import side_by_side

SUFFIX = ".guidance"
_TEMPORARY = ".tmp-"
_LOCK = ".lock"


class FileStore:
    """A :class:`~tracefp4.guidance.store.Store` in a directory.

    Args:
        directory: made if it does not exist, readable by its owner only.
        name: what handles carry; by default the absolute path, which other processes on the machine can open.
        read_only: take no lock; ``put``, ``delete`` and ``clear`` are refused.
        fsync: flush each frame and its name to the device before ``put`` returns. Guidance can be recorded again, so
            by default it is only safe against the death of the process, not of the machine.

    Raises:
        GuidanceError: another writer has the directory, or it cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        name: str | None = None,
        read_only: bool = False,
        fsync: bool = False,
    ) -> None:
        self.path = Path(directory).absolute()
        self._name = name or str(self.path)
        self._read_only, self._fsync = read_only, fsync
        self._guard = threading.Lock()
        self._lock_fd: int | None = None
        self._fd: int | None = None
        with self._explained("open the store"):
            if not read_only:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if not read_only:
                self._lock(self._fd)

    @property
    def name(self) -> str:
        """Name that handles carry."""
        return self._name

    @property
    def nbytes(self) -> int:
        """Bytes of all frames at the moment."""
        with self._explained("list"):
            return sum(self._stat(name).st_size for name in self._names() if _key_of(name) is not None)

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Names of temporary files that a writer left behind. While a writer is at work, its own are among them."""
        return tuple(sorted(name for name in self._names() if name.startswith(_TEMPORARY)))

    @property
    def foreign(self) -> tuple[str, ...]:
        """Names of everything in the directory that is no frame, no lock and no temporary file."""
        own = (_LOCK, *self.leftovers)
        return tuple(sorted(name for name in self._names() if _key_of(name) is None and name not in own))

    def put(self, key: str, data: Data) -> Handle:
        """Write ``data`` under ``key``; see :meth:`Store.put <tracefp4.guidance.store.Store.put>`."""
        name = check_key(key) + SUFFIX
        view = memoryview(data).cast("B")
        if not len(view):
            raise GuidanceError(f"no bytes to keep under {key!r}")
        self._check_writer()
        handle = Handle(self._name, key, len(view))
        with self._guard, self._explained(f"write {len(view)} bytes under {key!r}"):
            try:
                same = self._read(handle) == view
            except GuidanceMissing:
                self._write(name, view)
                return handle
            except GuidanceCorrupt:
                same = False
        if not same:
            raise GuidanceError(f"{self._name!r} holds other bytes under {key!r}; delete them first")
        return handle

    @property
    def serves_pulls(self) -> bool:
        """Files have what was written; nobody answers for their engine later."""
        return False

    def keep(self, key: str, frame: Pending) -> Handle:
        """Take a frame from its engine at once, and keep it; one that leaves bits with the engine is refused."""
        if frame.source is not None:
            raise GuidanceError(f"{key!r} leaves bits with its engine, which {self._name!r} could not ask for them")
        return self.put(key, frame.take())

    def keep_all(self, frames: Sequence[tuple[str, Pending]]) -> list[Handle]:
        """Take frames side by side, each written as soon as it is there: few of them are in memory at once."""
        return side_by_side([partial(self.keep, key, frame) for key, frame in frames])

    def get(self, handle: Handle) -> memoryview:
        """Map the file of a handle; see :meth:`Store.get <tracefp4.guidance.store.Store.get>`."""
        if handle.store != self._name:
            raise GuidanceMissing(f"{handle.key!r} lies in store {handle.store!r}, this is {self._name!r}")
        check_key(handle.key)
        with self._explained(f"read {handle.key!r}"):
            return self._read(handle)

    def pull(self, site: Site, wanted: Sequence[tuple[Handle, np.ndarray]]) -> list[np.ndarray]:
        """Refused; see :attr:`serves_pulls`."""
        keys = ", ".join(repr(handle.key) for handle, _ in wanted)
        raise GuidanceError(f"{self._name!r} keeps files, and no bits of {keys} that could be pulled")

    def delete(self, handle: Handle) -> None:
        """Remove the file of a handle."""
        self._check_writer()
        if handle.store != self._name:
            raise GuidanceMissing(f"{handle.key!r} lies in store {handle.store!r}, this is {self._name!r}")
        name = check_key(handle.key) + SUFFIX
        with self._guard, self._explained(f"delete {handle.key!r}"):
            try:
                os.unlink(name, dir_fd=self._directory())
            except FileNotFoundError:
                raise self._missing(handle.key) from None

    def keys(self) -> tuple[str, ...]:
        """Keys of all frames, sorted."""
        return tuple(sorted(key for key in map(_key_of, self._names()) if key is not None))

    def clear(self) -> None:
        """Remove every frame, and nothing else."""
        self._check_writer()
        with self._guard, self._explained("clear the store"):
            for name in self._names():
                if _key_of(name) is not None:
                    os.unlink(name, dir_fd=self._directory())

    def remove_leftovers(self) -> int:
        """Remove the temporary files of dead writers; returns how many. This writer has the lock, so all are dead."""
        self._check_writer()
        with self._guard, self._explained("remove temporary files"):
            names = self.leftovers
            for name in names:
                os.unlink(name, dir_fd=self._directory())
        return len(names)

    def close(self) -> None:
        """Give the directory back. Files stay; mapped frames stay readable. Closing twice is harmless."""
        for fd in (self._lock_fd, self._fd):
            if fd is not None:
                os.close(fd)
        self._lock_fd = self._fd = None

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lock(self, directory: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._lock_fd = os.open(_LOCK, flags, 0o600, dir_fd=directory)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise GuidanceError(
                f"another store writes to {self.path}; give each run its own directory, or open it with read_only=True"
            ) from None
        except OSError:
            self.close()
            raise

    def _write(self, name: str, view: memoryview) -> None:
        """Write a temporary file and rename it. Whatever fails, the temporary file goes and nothing else changes."""
        directory = self._directory()
        temporary = f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600, dir_fd=directory)
        try:
            try:
                while len(view):
                    view = view[os.write(fd, view) :]
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
        if self._fsync:
            os.fsync(directory)

    def _read(self, handle: Handle) -> memoryview:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(handle.key + SUFFIX, flags, dir_fd=self._directory())
        except FileNotFoundError:
            raise self._missing(handle.key) from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise GuidanceCorrupt(f"{handle.key!r} in {self._name!r} is a link; frames are regular files") from None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != handle.nbytes or not found.st_size:
                what = f"has {found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "is no regular file"
                raise GuidanceCorrupt(f"{handle.key!r} in {self._name!r} {what}, its handle says {handle.nbytes} bytes")
            return memoryview(mmap.mmap(fd, found.st_size, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)

    def _names(self) -> list[str]:
        return os.listdir(self._directory())

    def _stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._directory(), follow_symlinks=False)

    def _directory(self) -> int:
        if self._fd is None:
            raise GuidanceError(f"store {self._name!r} is closed")
        return self._fd

    def _check_writer(self) -> None:
        self._directory()
        if self._read_only:
            raise GuidanceError(f"store {self._name!r} was opened to read only")

    def _missing(self, key: str) -> GuidanceMissing:
        return GuidanceMissing(f"no guidance under {key!r} in {self._name!r} ({len(self.keys())} frames)")

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn an error of the operating system into one sentence; a full disk also says what is free."""
        try:
            yield
        except OSError as error:
            free = ""
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                free = f"; {_free(self.path)} bytes are free there"
            raise GuidanceError(f"cannot {what} in {self.path}: {error.strerror or error}{free}") from error


def _key_of(name: str) -> str | None:
    """The key of a frame's file name; ``None`` for any other name."""
    key = name.removesuffix(SUFFIX)
    if key == name:
        return None
    try:
        return check_key(key)
    except GuidanceError:
        return None


def _free(path: Path) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
