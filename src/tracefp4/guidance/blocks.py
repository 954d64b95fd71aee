"""Memory that frames are written into.

Fresh memory is slow: the system zeroes a page when it is first touched, and with pages of 4 KiB it is interrupted six
hundred times for a frame of 2.4 MB, which takes longer than writing the frame. So frames lie one after the other in
*blocks* of 32 MiB, and a block whose frames are all gone is written again. In a process that uses a GPU they are
pinned, so that a frame goes to the device as it lies; elsewhere large pages are asked for.

A frame must not change under whoever holds it. A block is therefore lent: everything that looks at a frame (a slice of
it, an array, a tensor) keeps the lease alive, and only when the last one is gone does the block become idle. The price
is that one frame keeps its neighbours' memory, at most a block.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque

import numpy as np
import torch

from tracefp4.guidance.layout import align

BLOCK = 1 << 25
"""Bytes of a block."""

IDLE_BYTES = 1 << 31
"""What idle blocks may hold; what is more goes back to the system."""


class Blocks:
    """Hands out memory, block after block. Safe to use from several threads.

    Args:
        size: bytes of a block.
        idle_bytes: most bytes of blocks that nobody uses.
    """

    def __init__(self, size: int = BLOCK, idle_bytes: int = IDLE_BYTES) -> None:
        self._size, self._most_idle = size, idle_bytes // size
        self._idle: deque[memoryview] = deque()
        self._lease, self._used = memoryview(b""), 0
        self._lock = threading.Lock()

    @property
    def idle(self) -> int:
        """Blocks that nobody uses."""
        return len(self._idle)

    def take(self, nbytes: int) -> memoryview:
        """Writable memory of any content, at an address that is a multiple of 64; ours until no view of it is left.

        What is larger than a block has memory of its own.
        """
        if nbytes > self._size:
            return _map(nbytes)
        with self._lock:
            if self._used + nbytes > len(self._lease):
                self._lease, self._used = self._lend(), 0
            start, self._used = self._used, self._used + align(nbytes)
            return self._lease[start : start + nbytes]

    def _lend(self) -> memoryview:
        try:
            block = self._idle.pop()
        except IndexError:
            block = _map(self._size)
        lease = np.frombuffer(block, np.uint8)
        weakref.finalize(lease, self._take_back, block).atexit = False
        return lease.data

    def _take_back(self, block: memoryview) -> None:
        # Runs wherever the last view dies, perhaps in a thread that holds the lock: so it takes none.
        if len(self._idle) < self._most_idle:
            self._idle.append(block)


def _map(nbytes: int) -> memoryview:
    """Fresh memory: pinned beside a GPU, else on large pages where the system has them."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a machine may allow little of it
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


BLOCKS = Blocks()
"""The blocks of this process."""
