"""Read a run folder.

A run leaves ``config.toml`` (resolved), ``metrics.jsonl`` and, where it got that far, ``samples.jsonl`` and
``summary.json``. One JSON object a line: ``{"step": 3, "time": 1712.4, "reward/mean": 0.31, ...}``. Not every step has
every metric: the mismatch without guidance is measured every few steps, evaluations are rarer still. A series is
therefore the list of the steps that have the metric, never a padded column.

What is odd about a file is kept as a note and shown on the page: a last line cut off by a crash, values that were not
finite (written as ``null``), a step recorded twice after a resume (the later one counts).
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracefp4.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the steps that have it."""

    steps: list[int]
    values: list[float]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def last(self) -> float:
        """The latest value."""
        return self.values[-1]

    def head(self, count: int) -> float:
        """Mean of the first ``count`` values."""
        return _mean(self.values[:count])

    def tail(self, count: int) -> float:
        """Mean of the last ``count`` values."""
        return _mean(self.values[-count:])

    def mean(self) -> float:
        """Mean of all values."""
        return _mean(self.values)


@dataclass(slots=True)
class Run:
    """Everything a report needs of one run."""

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    """Metrics, one mapping a step, in order of steps."""
    samples: list[dict[str, Any]]
    summary: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    def series(self, metric: str) -> Series:
        """The finite values of ``metric``; an empty series if the run has none."""
        pairs = [(row["step"], row[metric]) for row in self.rows if _is_number(row.get(metric))]
        return Series([step for step, _ in pairs], [float(value) for _, value in pairs])

    def intervals(self, metric: str) -> list[tuple[int, float, float]]:
        """Steps with a confidence interval ``metric + "_ci"``, as (step, low, high)."""
        found = [(row["step"], row.get(f"{metric}_ci") or []) for row in self.rows]
        return [(step, float(ci[0]), float(ci[1])) for step, ci in found if _is_interval(ci)]

    def evaluations(self) -> list[str]:
        """Names of the metrics ``eval/<task>/pass@1`` that the run has."""
        names = {key for row in self.rows for key in row if key.startswith("eval/") and key.endswith("/pass@1")}
        return sorted(names)

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the configuration by dotted name."""
        node: Any = self.config
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node


def read_run(folder: str | Path) -> Run:
    """Read one run folder.

    Args:
        folder: the run's ``output_dir``.

    Raises:
        ConfigError: the folder or ``metrics.jsonl`` is missing or empty, or a file is malformed; names file and line.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"run folder {str(folder)!r} does not exist")
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"{str(folder)!r} is no run folder: it has no metrics.jsonl")
    notes: list[str] = []
    rows = _latest_by_step(read_lines(folder / "metrics.jsonl", notes), notes)
    if not rows:
        raise ConfigError(f"{str(folder / 'metrics.jsonl')!r} has no complete line yet: no step has finished")
    dropped = sum(
        value is None or (isinstance(value, float) and not math.isfinite(value)) for r in rows for value in r.values()
    )
    if dropped:
        notes.append(f"{dropped} metric values were not finite and are left out.")
    samples = read_lines(folder / "samples.jsonl", notes) if (folder / "samples.jsonl").is_file() else []
    return Run(folder, _read_config(folder / "config.toml", notes), rows, samples, read_summary(folder), notes)


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """All JSON objects of a file, one a line; a last line cut off by a crash is left out and noted.

    Raises:
        ConfigError: any other malformed line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    lines = text.split("\n")
    rows: list[dict[str, Any]] = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if index == len(lines) - 1:  # no newline after it: the writer died within this line
                notes.append(f"The last line of {path.name} is incomplete and is left out.")
                break
            raise ConfigError(f"{str(path)!r} line {index + 1} is not JSON: {error.msg}") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ConfigError(f"{str(path)!r} line {index + 1} is not an object with an integer 'step'")
        rows.append(row)
    return rows


def _latest_by_step(rows: list[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """Lines of the same step are merged: training and evaluation may write one each; a repeated metric is a resume."""
    merged: dict[int, dict[str, Any]] = {}
    repeated = 0
    for row in rows:
        known = merged.setdefault(row["step"], {})
        repeated += any(key in known for key in row if key not in ("step", "time"))
        known.update(row)
    if repeated:
        notes.append(f"{repeated} steps were recorded more than once; the later values count.")
    return [merged[step] for step in sorted(merged)]


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        notes.append("config.toml is missing.")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error


def read_summary(folder: Path) -> dict[str, Any]:
    """The object in ``summary.json``, empty where there is no such file; :class:`ConfigError` if it is malformed."""
    path = folder / "summary.json"
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(summary, dict):
        raise ConfigError(f"{str(path)!r} is not a JSON object")
    return summary


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_number(end) for end in value)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
