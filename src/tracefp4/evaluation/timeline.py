"""What a device did in a few steps: how long it was busy, when it waited and after what, which kernels took the time.

PyTorch's profiler writes a trace of *spans*. On a GPU those of the device are kernels, copies and fills; ranges that
PyTorch only names there (``Optimizer.step``) are left out, or kernels would count twice. Kernels of several streams may
run at once, so the time in which the device is *busy* is that of the union of its spans, and its *gaps* are what the
union leaves out. Times of kernels by name are plain sums and may exceed it.

On a CPU the spans are operators, of which many call others; a name then gets the time of its operators without those
they call. Steps are few, so figures are means over all of them.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tracefp4.evaluation.bench import wait_for

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that are work of a GPU."""
HOST = ("cpu_op",)
LONGEST_GAPS = 5
FIRST_NAMES = 30


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran; times in microseconds."""

    name: str
    start: float
    stop: float
    own: float
    """Its time without that of spans which it called."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which nothing ran, in microseconds."""

    us: float
    before: str
    """What had run last."""
    after: str
    """What ran next."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Everything of one name, by step."""

    name: str
    us: float
    launches: float


@dataclass(frozen=True, slots=True)
class Profile:
    """``steps`` steps of one arm."""

    arm: str
    steps: int
    wall_us: float
    """A step on the host's clock, without the profiler."""
    profiled_us: float
    """The same with it; busy and idle time are parts of this."""
    spans: list[Span]

    @property
    def busy_us(self) -> float:
        """Of a step: something ran."""
        return sum(stop - start for start, stop in _union(self.spans)) / self.steps

    @property
    def idle_us(self) -> float:
        """Of a step: nothing ran, gaps as well as the time before the first span and after the last."""
        return self.profiled_us - self.busy_us

    @property
    def kernels(self) -> list[Kernel]:
        """All names, by total time."""
        times: dict[str, float] = defaultdict(float)
        launches = Counter(span.name for span in self.spans)
        for span in self.spans:
            times[span.name] += span.own
        found = [Kernel(name, us / self.steps, launches[name] / self.steps) for name, us in times.items()]
        return sorted(found, key=lambda kernel: -kernel.us)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in microseconds a step, except those of gaps."""
        kernels = [[k.us, k.launches, k.name] for k in self.kernels]
        longest = sorted(gaps(self.spans), key=lambda gap: -gap.us)[:LONGEST_GAPS]
        return {
            "arm": self.arm,
            "steps": self.steps,
            "wall_us": self.wall_us,
            "profiled_us": self.profiled_us,
            "busy_us": self.busy_us,
            "idle_us": self.idle_us,
            "kernels_us": sum(k[0] for k in kernels),
            "gaps: us, before, after": [[gap.us, gap.before, gap.after] for gap in longest],
            "kernels: us, launches, name": _first(kernels),
        }


def difference(base: Profile, other: Profile) -> dict[str, Any]:
    """What a step of ``other`` takes more than one of ``base``, name by name, the largest difference first."""
    both = [{kernel.name: kernel for kernel in one.kernels} for one in (base, other)]
    rows = []
    for name in dict.fromkeys([*both[0], *both[1]]):
        a, b = (kernels.get(name, Kernel(name, 0.0, 0.0)) for kernels in both)
        rows.append([b.us - a.us, a.us, b.us, a.launches, b.launches, name])
    rows.sort(key=lambda row: -abs(row[0]))
    return {
        "arm": other.arm,
        "against": base.arm,
        "wall_us": other.wall_us - base.wall_us,
        "profiled_us": other.profiled_us - base.profiled_us,
        "busy_us": other.busy_us - base.busy_us,
        "idle_us": other.idle_us - base.idle_us,
        "kernels_us": sum(row[0] for row in rows),
        "kernels: us more, us against, us, launches against, launches, name": _first(rows),
    }


def _first(rows: list[list[Any]]) -> list[list[Any]]:
    """The first rows of numbers and a name, and the sum of the others as one more, so that columns add up."""
    first, others = rows[:FIRST_NAMES], rows[FIRST_NAMES:]
    if others:
        *columns, _ = zip(*others, strict=True)
        first.append([*map(sum, columns), f"({len(others)} others)"])
    return first


def observe(arm: str, work: Callable[[int], object], steps: int, device: torch.device) -> Profile:
    """Time ``steps`` warm steps, then profile as many.

    Args:
        arm: their name.
        work: does as many steps as it is told, and need not wait for the device.
        steps: at least one.
        device: where they run.
    """
    wall = _seconds(work, steps, device)
    cuda = device.type == "cuda"
    # Operators are not recorded on a GPU: that would cost the host more than launching them does.
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        profiled = _seconds(work, steps, device)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    return Profile(arm, steps, 1e6 * wall / steps, 1e6 * profiled / steps, spans_of(trace, DEVICE if cuda else HOST))


def spans_of(trace: dict[str, Any], categories: tuple[str, ...]) -> list[Span]:
    """Spans of a trace of PyTorch's profiler, by start.

    Args:
        trace: in the format of Chrome's tracing.
        categories: of the events that count.
    """
    tracks: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in categories:
            tracks[event.get("pid"), event.get("tid")].append(event)
    found: list[Span] = []
    for events in tracks.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        own = [float(event["dur"]) for event in events]
        callers: list[int] = []
        for index, event in enumerate(events):
            while callers and event["ts"] >= events[callers[-1]]["ts"] + events[callers[-1]]["dur"]:
                callers.pop()
            if callers and event["cat"] in HOST:  # what runs on a GPU calls nothing
                own[callers[-1]] -= event["dur"]
            callers.append(index)
        for event, left in zip(events, own, strict=True):
            start = float(event["ts"])
            found.append(Span(event["name"], start, start + float(event["dur"]), left))
    return sorted(found, key=lambda span: (span.start, -span.stop))


def gaps(spans: Iterable[Span]) -> list[Gap]:
    """Times between spans in which none ran, in their order."""
    found, last = [], None
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        if last is not None and span.start > last.stop:
            found.append(Gap(span.start - last.stop, last.name, span.name))
        if last is None or span.stop > last.stop:
            last = span
    return found


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.stop)
        else:
            found.append((span.start, span.stop))
    return found


def _seconds(work: Callable[[int], object], steps: int, device: torch.device) -> float:
    """Seconds until the device has done them."""
    wait_for(device)
    start = time.perf_counter()
    work(steps)
    wait_for(device)
    return time.perf_counter() - start
