"""The next micro-batch is made while this one trains.

Reading frames, checking them and laying their planes out in one buffer is work of the host, as much as a gigabyte a
micro-batch; copying it to the GPU takes as long as some layers do. So where there is a GPU a thread does both one
micro-batch ahead, and copies on a stream of its own. What it makes is the same, in the same order; an error of its is
raised where the micro-batch would have come. On a CPU a thread would only take time from the products.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tracefp4.guidance.runs import SiteRuns

T = TypeVar("T")


def ahead(makes: Iterable[Callable[[], T]], device: torch.device, *, threaded: bool | None = None) -> Iterator[T]:
    """Results of ``makes`` in order, each begun before the one in front of it is used up.

    Args:
        makes: what makes each; must not wait for what the caller does.
        device: where the tensors of the results lie.
        threaded: by a thread; on a GPU unless said otherwise.
    """
    if not (device.type == "cuda" if threaded is None else threaded):
        for make in makes:
            yield make()
        return
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(1) as pool:
        waiting: deque[Any] = deque()
        try:
            for make in makes:
                waiting.append(pool.submit(_make, make, stream))
                if len(waiting) > 1:
                    yield _arrived(waiting.popleft().result(), stream)
            while waiting:
                yield _arrived(waiting.popleft().result(), stream)
        finally:
            pool.shutdown(cancel_futures=True)


def _make(make: Callable[[], T], stream: torch.cuda.Stream | None) -> tuple[T, Any]:
    """The result, and an event that comes after its copies."""
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        result = make()
        return result, None if stream is None else stream.record_event()


def _arrived(made: tuple[T, Any], stream: torch.cuda.Stream | None) -> T:
    """The result, its tensors ready for the current stream and kept from the side stream until that is done."""
    result, event = made
    if stream is not None:
        here = torch.cuda.current_stream(stream.device)
        here.wait_event(event)
        for tensor in tensors_in(result):
            if tensor.is_cuda:
                tensor.record_stream(here)
    return result


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in dataclasses, tuples, lists, dictionaries and records kept as runs."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name))
    elif isinstance(value, SiteRuns):
        yield from tensors_in(value.parts)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
