"""Where frames lie between the engine that records them and the trainer that needs them.

A batch carries a :class:`~tracefp4.core.Handle`; the bytes stay in a store until the micro-batch that needs them is
built, and those of samples that train nothing are deleted unread. A store keeps bytes under keys and knows nothing of
their content. Rules that every store keeps:

* ``put`` of an existing key with equal bytes changes nothing (a repeated message is harmless); other bytes are refused.
* ``get`` returns a read-only view, and only if as many bytes are there as the handle says.
* What is missing raises :class:`~tracefp4.errors.GuidanceMissing`; nothing is made up.
* Keys are file names on every system: letters, digits and ``. _ : @ # = + -``, the first a letter or digit, at most
  160. :func:`make_key` makes one of anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from tracefp4.core import Handle, Site
from tracefp4.errors import GuidanceError

Data = bytes | bytearray | memoryview
"""What can be put into a store."""

Pull = Callable[[Site, Sequence[tuple[Any, np.ndarray]]], Sequence[np.ndarray]]
"""Hands over bits of a site, of several frames in one call: for each what its frame is known by, and rows int64
``(n,)``, ascending; for each in turn uint8 ``(n, vectors, bits * width / 8)``, on the host."""


class Source(NamedTuple):
    """Who has the bits of a frame."""

    pull: Pull
    key: Any
    """What ``pull`` knows the frame by."""


def pull_from(site: Site, wanted: Iterable[tuple[Source, np.ndarray]]) -> list[np.ndarray]:
    """Bits of a site from their sources: those that stand together and have the same ``pull`` are asked for at once.

    Args:
        site: which site.
        wanted: sources, and rows int64 ``(n,)``, ascending, of each.

    Returns:
        For each source in turn uint8 ``(n, vectors, bits * width / 8)``.
    """
    found: list[np.ndarray] = []
    for pull, some in groupby(wanted, key=lambda one: one[0].pull):
        found += pull(site, [(source.key, rows) for source, rows in some])
    return found


MAX_KEY = 160
_KEY = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:@#=+-]{{0,{MAX_KEY - 1}}}")


@dataclass(frozen=True, slots=True)
class Pending:
    """A frame that its engine still has. Exactly one of the two calls follows, once."""

    nbytes: int
    """Bytes of the frame."""
    take: Callable[[], Data]
    """Hands the bytes over; the engine keeps nothing of them, and never changes them."""
    drop: Callable[[], None]
    """Forgets them where they lie."""
    source: Source | None = None
    """Who has the bits that the frame has only checks of; may be asked until the frame is deleted."""


class Store(Protocol):
    """Keeps frames under keys."""

    @property
    def name(self) -> str:
        """Name that handles carry."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes kept at the moment."""
        ...

    @property
    def serves_pulls(self) -> bool:
        """Whether :meth:`pull` works; if not, frames with bits to pull are refused."""
        ...

    def put(self, key: str, data: Data) -> Handle:
        """Keep ``data`` under ``key``.

        Raises:
            GuidanceError: the key is malformed or holds other bytes, or there is no room; nothing has changed then.
        """
        ...

    def keep(self, key: str, frame: Pending) -> Handle:
        """Keep a frame that its engine still has: one store takes it at once, another when it is first looked at.

        Raises:
            GuidanceError: as :meth:`put`.
        """
        ...

    def keep_all(self, frames: Sequence[tuple[str, Pending]]) -> list[Handle]:
        """Keep several under their keys, in this order; a store that takes them at once takes them side by side.

        Raises:
            GuidanceError: as :meth:`put` for the first that cannot be kept. Some of those after it may be kept or not.
        """
        ...

    def get(self, handle: Handle) -> memoryview:
        """The bytes of a handle, read-only, valid for as long as the view lives.

        Raises:
            GuidanceMissing: nothing is kept under this handle.
            GuidanceCorrupt: another number of bytes than the handle says.
        """
        ...

    def pull(self, site: Site, wanted: Sequence[tuple[Handle, np.ndarray]]) -> Sequence[np.ndarray]:
        """Bits that frames have only checks of, from the engines that kept them: a :data:`Pull`, keyed by handle.

        Raises:
            GuidanceMissing: nothing is kept under a handle, or its frame came without bits to pull.
            GuidanceError: the store does not serve pulls, or there are no such rows.
        """
        ...

    def delete(self, handle: Handle) -> None:
        """Forget a frame, and what can be pulled of it.

        Raises:
            GuidanceMissing: it is not there.
        """
        ...

    def keys(self) -> tuple[str, ...]:
        """Keys at the moment, sorted."""
        ...

    def clear(self) -> None:
        """Forget every frame."""
        ...

    def close(self) -> None:
        """Release what the store holds. Views taken before stay readable; every later call is refused."""
        ...


def check_key(key: str) -> str:
    """Return ``key`` if it is one.

    Raises:
        GuidanceError: it is not; the message offers one.
    """
    if not _KEY.fullmatch(key):
        raise GuidanceError(f"{key[:80]!r} is not a key of a store (did you mean {make_key(key)[:80]!r}?)")
    return key


def make_key(*parts: object) -> str:
    """A key made of anything, different for different parts: they join with ``.``, other characters become ``=hex=``.

    A key that would be too long ends in a hash of the whole instead.
    """
    key = ".".join(re.sub(r"[^A-Za-z0-9_:@#+-]", _escape, str(part)) for part in parts)
    if not key[:1].isalnum():
        key = f"0={key}"
    if len(key) <= MAX_KEY:
        return key
    digest = xxhash.xxh3_128_hexdigest("\x1f".join(map(str, parts)).encode())
    return f"{key[: MAX_KEY - 34]}=={digest}"


def _escape(match: re.Match[str]) -> str:
    return f"={ord(match.group()):x}="
