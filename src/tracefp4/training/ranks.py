"""Several processes that train one model, each on a device of its own.

``torchrun`` starts them and tells each its number. Every *rank* runs an engine of its own on its share of the prompts,
reads the guidance of its own rollouts and nobody else's, and trains on its own samples; gradients are added up over the
ranks (:mod:`tracefp4.training.sharding`). So neither tokens nor guidance travel. What does travel is small: counts that
a loss is divided by, numbers for the log, a wish to stop. That goes as JSON or float64, over the host's network (gloo),
never over the GPU's. One process alone is the case of one rank, and waits for nobody.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tracefp4.errors import ConfigError, TrainingError

PATIENCE = timedelta(hours=2)
"""How long a rank waits for the others: rollouts of one rank, or a warm start that the first one makes, may take
long."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together.

    All methods but :meth:`share` are collective: every rank calls them, in the same order.
    """

    rank: int = 0
    size: int = 1
    line: _Line | None = field(default=None, repr=False, compare=False)
    """What joins several ranks."""

    @property
    def first(self) -> bool:
        """Whether this rank writes logs and checkpoints."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This rank's part of ``count`` things: consecutive, and as many as the others have, give or take one."""
        each, rest = divmod(count, self.size)
        start = self.rank * each + min(self.rank, rest)
        return slice(start, start + each + (self.rank < rest))

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, a JSON value, in order of rank; floats come back exactly."""
        return [json.loads(data) for data in self._exchange(json.dumps(value).encode())]

    def gather_array(self, array: np.ndarray) -> np.ndarray:
        """The ranks' float64 arrays ``(n_i,)`` one after the other."""
        data = np.ascontiguousarray(array, dtype=np.float64)
        return np.concatenate([np.frombuffer(part, dtype=np.float64) for part in self._exchange(data.tobytes())])

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, float64 and in order of rank; the same on all."""
        return [float(sum(column)) for column in zip(*self.gather(list(values)), strict=True)]

    def merge(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Sums by name, of the names that any rank has."""
        out: dict[str, float] = {}
        for part in self.gather(dict(counts)):
            for name, count in part.items():
                out[name] = out.get(name, 0.0) + count
        return out

    def most(self, value: int) -> int:
        """The largest of the ranks' values."""
        return max(self.gather(value))

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        return any(self.gather(flag))

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """The first rank runs the block, then the others do: what it left in a cache is there for them."""
        if not self.first:
            self.gather(None)
        yield
        if self.first:
            self.gather(None)

    def _exchange(self, data: bytes) -> list[bytes]:
        if self.size == 1:
            return [data]
        if self.line is None or self.line.group is None:
            raise TrainingError(f"rank {self.rank} of {self.size} is not joined to the others, or no longer")
        group = self.line.group
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group)
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group)
        return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


@dataclass(slots=True)
class _Line:
    """A group of processes for what :class:`Ranks` exchanges, and for nothing else.

    Its threads hand tensors back to Python, and abort a process whose interpreter ends meanwhile. They are waited for
    when the group is no more, so nothing may hold on to it: others than ours keep the default one in caches.
    """

    group: dist.ProcessGroup | None


ALONE = Ranks()
"""One process."""


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started for the length of a ``with`` block; without it, be alone.

    On a machine with CUDA every process takes the GPU of its local number as current device.

    Raises:
        ConfigError: more processes on this machine than it has GPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    backend = "gloo"
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}; "
                f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=PATIENCE)
    line = _Line(dist.new_group(backend="gloo", timeout=PATIENCE))  # type: ignore[arg-type]
    try:
        yield Ranks(dist.get_rank(), size, line)
    finally:
        dist.destroy_process_group()
        line.group = None
