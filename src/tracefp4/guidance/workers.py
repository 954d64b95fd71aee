"""Several frames at once.

Writing, hashing and laying out a frame are copies and sums of megabytes, during which Python lets other threads run.
Frames do not depend on one another, so a group of them is worked on side by side. Threads live as long as the call:
starting them takes less than a frame, and nothing is left behind for a process that forks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MOST = 8
"""Threads of a call, at most."""

_PARTS = 4
"""Parts of the works for each thread: enough that all end at about the same time."""


def side_by_side(works: Sequence[Callable[[], T]], threads: int | None = None) -> list[T]:
    """Results of ``works`` in their order, made by several threads.

    Args:
        works: must not wait for one another.
        threads: how many; as many as the machine has processors, but at most :data:`MOST`, unless said otherwise.

    Raises:
        what a work raised, of several the first in order. Some of those after it may have been done or not.
    """
    count = min(threads or min(MOST, os.cpu_count() or 1), len(works))
    if count <= 1:
        return [work() for work in works]
    size = max(1, len(works) // (count * _PARTS))

    def part(first: int) -> list[T]:
        return [work() for work in works[first : first + size]]

    with ThreadPoolExecutor(count) as pool:
        return [result for results in pool.map(part, range(0, len(works), size)) for result in results]
