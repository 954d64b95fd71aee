"""Work on tensors that stay, repeated as a CUDA graph.

A sync packs some sixty weights and sums up four hundred tensors twice. On a GPU that is milliseconds of kernels and a
tenth of a second of launches, for each of several passes and in every step. What is launched is the same every time, at
the same addresses, so from the second time on it is recorded once and then replayed for the price of one launch.

A graph keeps its temporary memory for itself. Large tensors keep a GPU busy anyway, so work on them is not worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

Replay = Callable[[], None]
Body = Callable[[], list[Tensor]]
Capture = Callable[[Sequence[Body]], list[tuple[list[Tensor], Replay]]]
"""Runs functions one after the other; returns the results of each, and what computes them again, in place."""

LARGEST = 1 << 26
"""Values of the largest tensor that graphs are worth it for."""


def cuda_graphs() -> Capture:
    """Capturing as CUDA graphs that share one pool of memory."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(body: Body) -> tuple[list[Tensor], Replay]:
        graph = torch.cuda.CUDAGraph()
        # Another thread may be reading guidance ahead, with allocations and copies of its own.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            results = body()
        return results, graph.replay

    def capture(bodies: Sequence[Body]) -> list[tuple[list[Tensor], Replay]]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for body in bodies:
                body()
        return [record(body) for body in bodies]

    return capture


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...] | None:
    """What a graph of work on these tensors depends on; ``None`` if it is not worth one."""
    found = []
    for tensor in tensors:
        if not tensor.is_cuda or tensor.numel() > LARGEST:
            return None
        found.append(tensor.data_ptr())
    return tuple(found)


def first_line(error: RuntimeError) -> str:
    """What CUDA says where something that is captured waits for the device, without advice."""
    return str(error).split("\n", 1)[0]


class Repeated:
    """Work that is done again and again.

    Args:
        capture: how it is captured; as a CUDA graph with a pool of its own if ``None``.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = capture
        self._key: Hashable = None
        self._captured: tuple[list[Tensor], Replay] | None = None
        self.failure: str | None = None
        """Why capturing failed; everything is launched one by one since."""

    def run(self, key: Hashable, body: Body) -> list[Tensor]:
        """Do the work; returns its results, which the next call overwrites.

        Args:
            key: for equal keys in a row the same is launched at the same addresses; ``None``: never.
            body: the work. It waits for nothing on the host.
        """
        if key is None or self.failure is not None:
            return body()
        if key != self._key:
            self._key, self._captured = key, None
            return body()  # compiles kernels and makes tables, which a capture could not
        if self._captured is None:
            try:
                [self._captured] = (self._capture or cuda_graphs())([body])
            except RuntimeError as error:
                self.failure = first_line(error)
                return body()
        results, replay = self._captured
        replay()
        return results
