"""How long things take, beside the time that their bytes alone would take.

Every figure of ``tracefp4 bench`` is the median of many runs, and stands beside a *bound*: the bytes that have to move,
divided by the copy bandwidth of this very device, measured in the same run. Where operations may take longer than bytes
it is the larger of the two, with the rate of a large bfloat16 product on this device. A ratio compares with the
bfloat16 arm of the same case. On CUDA a case is captured in a CUDA graph, so that launches from Python are not timed;
it is repeated there until the launch of the graph does not count, and walks over several sets of buffers, so that none
is found in the cache. What fails is listed with its error and does not end the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from tracefp4.errors import ConfigError, TraceError

Work = Callable[[], object]


@dataclass(slots=True)
class Row:
    """One measurement."""

    name: str
    arm: str
    """``bf16``, ``fp4`` with its format, or the name of a peer."""
    value: float
    unit: str
    bound: float | None = None
    """In the same unit, from bytes, or from operations if those take longer."""
    ratio_to_bf16: float | None = None
    """Above 1: faster than the bfloat16 arm of the same name."""
    detail: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    """What the value is made of, by names that end in their unit."""


@dataclass(slots=True)
class Bench:
    """Measurements of one run on one device."""

    device: torch.device
    repeats: int = 20
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""
    show: Callable[[str], object] | None = None
    """Told of every row, failure and note as it comes, in one line."""
    grown: Callable[[], object] | None = None
    """Called after each of them, so that a run that is killed keeps what it had."""
    _bandwidth: float | None = None
    _launch: float | None = None
    _product_rate: float | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes a second of a large copy, reads and writes counted."""
        if self._bandwidth is None:
            size = 1 << (30 if self.device.type == "cuda" else 24)
            source = torch.ones(size // 4, dtype=torch.int32, device=self.device)
            target = torch.empty_like(source)
            # A kernel, because the memcpy node that a graph makes of copy_ is slower: 2.7 instead of 4.29 TB/s (H200).
            self._bandwidth = 2 * size / self.time([lambda: torch.add(source, 1, out=target)])
        return self._bandwidth

    @property
    def product_rate(self) -> float:
        """Operations a second of a large bfloat16 product."""
        if self._product_rate is None:
            size = 8192 if self.device.type == "cuda" else 1024
            a, b = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
            self._product_rate = 2.0 * size**3 / self.time([lambda: a @ b])
        return self._product_rate

    def least(self, nbytes: float, flops: float = 0.0) -> float:
        """Seconds that bytes and operations take at least, if they run side by side."""
        moved = nbytes / self.bandwidth
        return max(moved, flops / self.product_rate) if flops else moved

    @property
    def launch(self) -> float:
        """Seconds of a kernel that does almost nothing but wait for the one before it."""
        if self._launch is None:
            x = torch.zeros(1, device=self.device)
            count = 256 if self.device.type == "cuda" else 16
            self._launch = self.time([lambda: x.add_(1.0)] * count)
        return self._launch

    def time(self, works: Sequence[Work]) -> float:
        """Median seconds of one of ``works``, which do the same on different buffers."""
        if self.device.type == "cuda":
            return _cuda_time(works, self.repeats)
        for work in works:
            work()
        samples = []
        for _ in range(min(self.repeats, 5)):
            start = time.perf_counter()
            for work in works:
                work()
            samples.append(time.perf_counter() - start)
        return median(samples) / len(works)

    def add(
        self, name: str, arm: str, works: Sequence[Work], nbytes: float | None, detail: str = "", flops: float = 0.0,
        numbers: dict[str, float] | None = None,
    ) -> float | None:  # fmt: skip
        """Time a case and keep it, in microseconds; ``None`` if it failed."""
        try:
            seconds = self.time(works)
        except failures() as error:
            self.fail(name, arm, error)
            return None
        bound = None if nbytes is None else 1e6 * self.least(nbytes, flops)
        self.keep(Row(name, arm, 1e6 * seconds, "us", bound, detail=detail, numbers=numbers or {}))
        return seconds

    def best(
        self, name: str, arm: str, cases: Sequence[tuple[str, Sequence[Work]]], nbytes: float | None,
        flops: float = 0.0, numbers: dict[str, float] | None = None,
    ) -> str | None:  # fmt: skip
        """Time several configurations of one case, keep the fastest, and say which it was."""
        found: list[tuple[float, str]] = []
        for detail, works in cases:
            try:
                found.append((self.time(works), detail))
            except failures() as error:
                self.fail(f"{name} [{detail}]", arm, error)
        if not found:
            return None
        seconds, detail = min(found)
        others = ", ".join(f"{text} {1e6 * value:.1f}" for value, text in sorted(found)[1:])
        text = f"{detail} ({others})" if others else detail
        bound = None if nbytes is None else 1e6 * self.least(nbytes, flops)
        self.keep(Row(name, arm, 1e6 * seconds, "us", bound, detail=text, numbers=numbers or {}))
        return detail

    def keep(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)
        self._say(f"{row.name}, {row.arm}: {row.value:.6g} {row.unit}")

    def fail(self, name: str, arm: str, error: BaseException | str) -> None:
        """Note a case that could not be measured."""
        if not isinstance(error, str):
            error = f"{type(error).__name__}: {(str(error).strip() or ' ').splitlines()[0]}"
        self.failures.append(f"{name}, {arm}: {error[:240]}")
        self._say(f"failed: {self.failures[-1]}")

    def note(self, text: str) -> None:
        """Say what was left out."""
        if text not in self.notes:
            self.notes.append(text)
            self._say(f"note: {text}")

    def _say(self, line: str) -> None:
        if self.show is not None:
            self.show(line)
        if self.grown is not None:
            self.grown()

    def to_dict(self, *, finished: bool = True) -> dict[str, Any]:
        """Everything, with ratios filled in; nothing is measured for it if the run is not ``finished``."""
        base = {row.name: row.value for row in self.rows if row.arm == "bf16"}
        for row in self.rows:
            if row.name in base:
                quotient = base[row.name] / row.value
                row.ratio_to_bf16 = 1 / quotient if row.unit.endswith("/s") else quotient
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return {
            "device": name,
            "torch": torch.__version__,
            "finished": finished,
            "copy_bandwidth": self.bandwidth if finished else self._bandwidth,
            "product_rate": self._product_rate,
            "rows": [asdict(row) for row in self.rows],
            "failures": self.failures,
            "notes": self.notes,
        }


def failures() -> tuple[type[BaseException], ...]:
    """What a kernel that does not compile, fit or run raises."""
    found: tuple[type[BaseException], ...] = (TraceError, RuntimeError, ValueError, TypeError, KeyError, AssertionError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return found
    return (*found, TritonError)


def pick_device(name: str) -> torch.device:
    """The device called ``name``; ``auto`` takes CUDA where there is one.

    Raises:
        ConfigError: CUDA was asked for and is missing.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("this machine has no CUDA device; use --device cpu for the cases that need none.")
    return device


def need_cuda(bench: Bench, what: str) -> None:
    """Refuse a benchmark of kernels without a GPU.

    Raises:
        ConfigError: naming what can run instead.
    """
    if bench.device.type != "cuda":
        raise ConfigError(f"bench {what} measures GPU kernels and needs a CUDA device; without one try bench codec.")


_IN_GRAPH = 12
"""Works of a graph: starting one takes about ten microseconds."""


def wait_for(device: torch.device) -> None:
    """Return when a GPU has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_seconds(work: Work, repeats: int) -> list[float]:
    """Seconds of ``repeats`` runs on the host's clock, after one that does not count."""
    samples = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    return samples[1:]


def _cuda_time(works: Sequence[Work], repeats: int) -> float:
    for work in works:  # compiles, and makes tables
        work()
    torch.cuda.synchronize()
    works = [*works] * max(1, _IN_GRAPH // len(works))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [work() for work in works]
    for _ in range(3):
        graph.replay()
    samples = []
    for start, stop in _events(repeats):
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop) / 1e3)
    del kept
    return median(samples) / len(works)


def _events(count: int) -> Iterator[tuple[torch.cuda.Event, torch.cuda.Event]]:
    for _ in range(count):
        yield torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
