"""The memory through which guidance leaves a device: one ring, pinned beside a GPU.

A copy runs beside everything else only if it ends in pinned memory, which the system has to find and lends to nobody
else. So there is one piece of it, of fixed size, and what is sent takes the next place in it::

      | parcel 7 | parcel 8 |   free   | parcel 5 | parcel 6 |
                            ^ next     ^ oldest

All parts of a *parcel* travel on a stream of their own and have arrived together, when one event is done. A place is
free again when nobody looks at what lies there. When the ring is full of what is still wanted, the oldest parcel moves
into ordinary memory, for which the host waits until that one has arrived: nothing is dropped, and what was sent last
stays pinned. What is larger than the ring has ordinary memory from the start, and the host waits for its copy.

The same places are taken without a GPU; then a parcel has arrived when it was sent.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tracefp4.errors import GuidanceError
from tracefp4.guidance.layout import align

PATIENCE = 60.0
"""Seconds that a reader may take for a parcel that is to move."""


class Parcel:
    """Tensors that were sent together.

    Args:
        tensors: where they are or will be.
        arrival: what must be waited for before they are read.
    """

    def __init__(self, tensors: tuple[Tensor, ...], arrival: torch.Event | None = None) -> None:
        self._tensors, self._arrival = tensors, arrival

    @property
    def arrived(self) -> bool:
        """Whether :meth:`open` returns at once."""
        arrival = self._arrival
        return arrival is None or arrival.query()

    def open(self) -> tuple[Tensor, ...]:
        """The tensors, once they have arrived.

        Whoever keeps them longer than it takes to read them keeps their place in the ring, so copy what is to stay.
        """
        arrival = self._arrival
        if arrival is not None:
            arrival.synchronize()
            self._arrival = None
        return self._tensors

    def move(self) -> None:
        """Leave the ring. Those who read meanwhile read on at the old place, which stays theirs."""
        self._tensors = tuple(part.clone() for part in self.open())


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    stop: int
    parcel: weakref.ref[Parcel]
    left: threading.Event
    """Set when nobody looks at it."""


class Ring:
    """Sends tensors to the host, in order. For one thread; parcels may be opened by any.

    Args:
        nbytes: of the ring, which is allocated when it is first used.
        device: where tensors come from; memory for a GPU is pinned.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self._device = align(nbytes), device
        self._places: deque[_Place] = deque()
        """Oldest first."""
        self._memory: Tensor | None = None

    def send(self, parts: Sequence[Tensor]) -> Parcel:
        """Copy tensors to the host without waiting for the device, as long as the ring has room.

        Raises:
            GuidanceError: somebody reads the oldest parcel for more than :data:`PATIENCE` seconds.
        """
        *starts, total = accumulate((align(part.nbytes) for part in parts), initial=0)
        start = self._make_room(total)
        if start is None:
            return Parcel(tuple(part.to("cpu", copy=True) for part in parts))
        memory = self._allocated()[start : start + total]
        # Torch's own views of pinned memory keep it for as long as the copies run, whatever becomes of ring and lease.
        arrival = self._copy([_cut(memory, at, part) for at, part in zip(starts, parts, strict=True)], parts)
        lease = np.frombuffer(memory.numpy(), np.uint8)
        whole, left = torch.from_numpy(lease), threading.Event()
        weakref.finalize(lease, left.set).atexit = False
        parcel = Parcel(tuple(_cut(whole, at, part) for at, part in zip(starts, parts, strict=True)), arrival)
        self._places.append(_Place(start, start + total, weakref.ref(parcel), left))
        return parcel

    def _copy(self, targets: Sequence[Tensor], parts: Sequence[Tensor]) -> torch.Event | None:
        """Begin the copies; what they are done with, or ``None`` if they are done."""
        if self._device.type != "cuda":
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)
            return None
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part, non_blocking=True)
                part.record_stream(stream)
            return stream.record_event()

    def _allocated(self) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return self._memory

    def _make_room(self, total: int) -> int | None:
        """Where ``total`` bytes may lie; ``None`` if the ring is too small, or there is nothing to place."""
        if not 0 < total <= self.nbytes:
            return None
        while self._places and self._places[0].left.is_set():
            self._places.popleft()
        while (start := self._room(total)) is None:
            self._vacate(self._places[0])
            self._places.popleft()
        return start

    def _room(self, total: int) -> int | None:
        """Where ``total`` bytes are free behind the newest place, or at the start."""
        if not self._places:
            return 0
        first, end = self._places[0].start, self._places[-1].stop
        if end <= first:  # come round: what is free ends at the oldest
            return end if end + total <= first else None
        if end + total <= self.nbytes:
            return end
        return 0 if total <= first else None

    def _vacate(self, place: _Place) -> None:
        """Wait until nobody looks at the oldest place; its parcel, if anybody has it, moves out."""
        parcel = place.parcel()
        if parcel is not None:
            parcel.move()
        del parcel
        if not place.left.wait(PATIENCE):
            raise GuidanceError(
                f"{place.stop - place.start} bytes of guidance on their way from the device were looked at for "
                f"{PATIENCE:.0f} s while their memory was needed; copy what is to be kept"
            )


def parcel_bytes(parts: Iterable[Tensor]) -> int:
    """Bytes that tensors take in a ring."""
    return sum(align(part.nbytes) for part in parts)


def _cut(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Memory from ``start`` on as a tensor of the dtype and shape of ``like``."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which guidance leaves a GPU."""
    return torch.cuda.Stream(device)
