"""What commands print.

Three readers, three outputs. A person at a terminal gets a bar that moves and a table of the last steps. A log file
gets one plain line a step. A program gets, with ``--json``, one JSON object on standard output and nothing else there:
progress always goes to standard error.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
"""The ``--json`` flag, the same for every command."""

TRAIN_COLUMNS: tuple[tuple[str, str], ...] = (
    ("reward/mean", "reward"),
    ("mismatch_kl/mean", "mismatch"),
    ("mismatch_kl_unguided/mean", "unguided"),
    ("logprob_diff/max", "max dlogp"),
    ("entropy", "entropy"),
    ("response_length/mean", "length"),
    ("guidance/coverage", "coverage"),
    ("throughput/rollout_tok_s", "tok/s"),
)
"""Metrics of a training step that are worth a column, with the word that heads it."""

_TABLE_ROWS = 12


def stderr_console() -> Console:
    """The console for progress and notes; standard output stays free for results."""
    return Console(stderr=True, highlight=False)


def emit(data: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    """Print a command's result: ``data`` as one JSON object, or ``text`` for a person."""
    print(json.dumps(data, allow_nan=False, ensure_ascii=False) if as_json else text)


def number(value: Any) -> str:
    """A metric in at most seven characters: ``0.731``, ``8.1e-04``, ``12400``; ``-`` where there is none."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and size < 1e-3:
        return f"{value:.1e}"
    if float(value).is_integer() or size >= 1000:
        return f"{value:.0f}"
    return f"{value:.3f}" if size < 10 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``0.8 s``, ``4 min 05 s``, ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class LiveMetrics:
    """Metrics of training steps while they happen. Use it as a context manager.

    On a terminal: a table of the last steps above a bar with the time that remains. Elsewhere: one line a step, at
    once. A column appears when its metric does, so a run without guidance shows no empty guidance columns.

    Args:
        total: steps of the whole run.
        columns: pairs of metric name and heading.
        console: where to write; standard error by default.
        start: steps that were finished before (a resumed run).
    """

    def __init__(
        self,
        total: int,
        columns: Sequence[tuple[str, str]] = TRAIN_COLUMNS,
        console: Console | None = None,
        start: int = 0,
    ) -> None:
        self._console = console or stderr_console()
        self._total = total
        self._done = start
        self._columns = tuple(columns)
        self._seen: set[str] = set()
        self._rows: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_TABLE_ROWS)
        self._clock = time.perf_counter()
        self._progress = _bar(self._console)
        self._task = self._progress.add_task("steps", total=total, completed=start)
        self._live: Live | None = None

    def __enter__(self) -> LiveMetrics:
        self._clock = time.perf_counter()
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()
            self._live = None

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show one finished step, under the number that it has in ``metrics.jsonl``; unknown metrics are not shown."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        shown = {name: metrics[name] for name, _ in self._columns if metrics.get(name) is not None}
        self._seen |= shown.keys()
        self._done += 1
        self._rows.append((step, shown | {"seconds": seconds}))
        self._progress.update(self._task, completed=self._done)
        if self._live is not None:
            self._live.update(self._render())
            return
        parts = [f"{heading} {number(shown[name])}" for name, heading in self._columns if name in shown]
        self._line(f"step {step} ({self._done}/{self._total})  " + "  ".join([*parts, duration(seconds)]))

    def note(self, text: str) -> None:
        """Print a line that stays: an evaluation, a checkpoint, a warning."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _render(self) -> Group:
        active = [(name, heading) for name, heading in self._columns if name in self._seen]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("step", justify="right")
        for _, heading in active:
            table.add_column(heading, justify="right")
        table.add_column("s/step", justify="right", style="dim")
        for step, row in self._rows:
            cells = [number(row.get(name)) for name, _ in active]
            table.add_row(str(step), *cells, number(row["seconds"]))
        return Group(table, self._progress) if self._rows else Group(Text("waiting for the first step"), self._progress)


class _Counter:
    """What :func:`progress` yields: call it when something is done."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0

    def advance(self, amount: int = 1) -> None:
        """Count ``amount`` more as done."""
        self.done += amount


class _BarCounter(_Counter):
    def __init__(self, total: int, bar: Progress, task: Any) -> None:
        super().__init__(total)
        self._bar, self._task = bar, task

    def advance(self, amount: int = 1) -> None:
        """Move the bar."""
        super().advance(amount)
        self._bar.update(self._task, completed=self.done)


class _LineCounter(_Counter):
    def __init__(self, total: int, label: str, console: Console) -> None:
        super().__init__(total)
        self._label, self._console, self._tenth = label, console, 0

    def advance(self, amount: int = 1) -> None:
        """Print a line whenever another tenth is done."""
        super().advance(amount)
        tenth = 10 * self.done // max(self.total, 1)
        if tenth > self._tenth:
            self._tenth = tenth
            self._console.print(f"{self._label}: {self.done}/{self.total}", markup=False, soft_wrap=True)


@contextmanager
def progress(label: str, total: int, console: Console | None = None) -> Iterator[_Counter]:
    """A bar on a terminal, a line for every tenth elsewhere.

    Args:
        label: what is being done, for instance ``"warm start"``.
        total: units of work; call ``advance()`` on the yielded object for each.
        console: where to write; standard error by default.
    """
    console = console or stderr_console()
    if not console.is_terminal:
        yield _LineCounter(total, label, console)
        return
    with _bar(console) as bar:
        yield _BarCounter(total, bar, bar.add_task(label, total=total))


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
    )
