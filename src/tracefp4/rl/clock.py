"""Wall time of the parts of a step, and the memory that it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Measures named parts, and the whole since it was made."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a ``with`` block; the device is waited for at its end. Blocks of one name add up."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """``time/<name>_s`` of each part, and ``time/step_s`` since the clock was made.

        On a GPU also the most bytes that this process had in use and had taken from the device, in GiB: they say how
        many runs one GPU has room for.
        """
        found = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        found["time/step_s"] = time.perf_counter() - self._start
        if torch.cuda.is_available():
            found["memory/max_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            found["memory/max_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        return found
