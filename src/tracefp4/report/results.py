"""What a comparison leaves behind: one JSON file from which all its tables and figures can be drawn again.

Runs lie in ``runs/<arm>/seed-<n>``, each a folder of ``tracefp4 train`` with a ``job.json`` beside its records: the
command, how it ended, how long it took. :func:`collect` reads whatever is there, finished or not, from this machine or
copied from others, and keeps what tables and figures need: per-item scores of the first, the last and the best
evaluation, a few metrics by step, post-hoc quantizations, probes. No weights, some kilobytes a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.report.arms import POSTHOC, Arm
from tracefp4.report.run_data import Series, read_lines, read_run
from tracefp4.report.run_report import write_text

FORMAT = 1
SERIES = (
    *("reward/mean", "entropy", "response_length/mean", "grad_norm"),
    *("mismatch_kl/mean", "mismatch_kl_unguided/mean", "logprob_diff/max", "logprob_diff/min", "logprob_diff/p999"),
    *("guidance/bytes_per_token", "guidance/shipped_bytes_per_token", "guidance/saved_share", "guidance/coverage"),
    *("guidance/pulled_share", "guidance/scale_check_failures", "correction/ess", "time/step_s"),
)
"""Metrics that are kept by step."""


@dataclass(slots=True)
class Evaluation:
    """Scores of one evaluation, item by item."""

    step: int
    scores: list[float]

    @property
    def mean(self) -> float:
        """Mean over items."""
        return sum(self.scores) / len(self.scores)


@dataclass(slots=True)
class RunResult:
    """One seed of one arm."""

    seed: int
    status: str
    """``done``, ``failed`` or ``missing``."""
    command: str = ""
    seconds: float = 0.0
    """Of the run, without the making of a warm start, which other runs share."""
    steps: int = 0
    warm_start: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    first: Evaluation | None = None
    last: Evaluation | None = None
    best: Evaluation | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Mean score of every evaluation, by step."""
    series: dict[str, Series] = field(default_factory=dict)
    posthoc: dict[str, list[float]] = field(default_factory=dict)
    """Per-item scores after each post-hoc quantization."""
    measure: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None
    note: str = ""
    """The last line of the log of a run that failed."""


@dataclass(slots=True)
class Results:
    """A whole comparison."""

    task: str
    tables: list[str]
    arms: list[Arm]
    runs: dict[str, list[RunResult]]
    """By name of the arm, in order of seeds."""
    members: dict[str, list[str]]
    """Names of the arms of each table, in order."""

    def arm(self, name: str) -> Arm:
        """The arm called ``name``."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def leading(self) -> str:
        """The table that the verdict speaks of and whose curves are drawn: t1 or t7 if one is there, else the first."""
        return next((name for name in ("t1", "t7") if self.members.get(name)), self.tables[0])

    def done(self, name: str) -> list[RunResult]:
        """Finished runs of an arm that were evaluated."""
        return [run for run in self.runs[name] if run.status == "done" and run.last is not None]


def run_folder(out: Path, arm: str, seed: int) -> Path:
    """Where a run of a comparison lies."""
    return out / "runs" / arm / f"seed-{seed}"


def collect(
    out: Path,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    tables: Sequence[str],
    members: dict[str, list[str]],
    task: str,
) -> Results:
    """Read the runs of a comparison.

    Raises:
        ConfigError: a file of a finished run is malformed; the message names it.
    """
    runs = {arm.name: [read_result(run_folder(out, arm.name, seed), seed) for seed in seeds] for arm in arms}
    return Results(task, list(tables), list(arms), runs, members)


def read_result(folder: Path, seed: int) -> RunResult:
    """One run, as far as it got."""
    job = _json(folder / "job.json")
    if job is None:
        return RunResult(seed, "missing")
    result = RunResult(seed, job["status"], job["command"], job["seconds"], note=job.get("note", ""))
    if not (folder / "metrics.jsonl").is_file() or result.status != "done":
        return result
    run = read_run(folder)
    result.steps = 1 + max((row["step"] for row in run.rows if "reward/mean" in row), default=-1)
    result.warm_start = str(run.summary.get("warm_start", ""))
    result.seconds = max(0.0, result.seconds - float(run.summary.get("warm_start_seconds", 0.0)))
    result.environment = dict(run.summary.get("environment", {}))
    result.series = {name: series for name in SERIES if (series := _rounded(run.series(name)))}
    found = [Evaluation(row["step"], _whole(row["eval/scores"])) for row in _evaluations(folder)]
    if found:
        result.first, result.last = found[0], found[-1]
        # The evaluation before training is no step of it.
        result.best = max(found[1:] or found, key=lambda e: (e.mean, -e.step))
        result.curve = [(e.step, e.mean) for e in found]
    for method in POSTHOC:
        data = _json(folder / "posthoc" / f"{method}.json")
        if data is not None:
            result.posthoc[method] = _whole(data["by_item"])
    measured, rolled = _json(folder / "probe" / "measure.json"), _json(folder / "probe" / "profile.json")
    result.measure = None if measured is None else {k: v for k, v in measured.items() if k != "sites"}
    result.profile = None if rolled is None else rolled["profile"]
    return result


def complete(results: Results, others: Results) -> None:
    """Take over runs that are done there and not here, from the same comparison on another machine.

    Runs are told apart by arm and seed. Whether they may be paired is asked where they are, by their warm starts.

    Raises:
        ConfigError: an arm of one name is another arm there.
    """
    theirs = {arm.name: arm for arm in others.arms}
    for arm in results.arms:
        if arm.name not in theirs:
            continue
        if theirs[arm.name] != arm:
            raise ConfigError(f"arm {arm.name!r} has other settings in the results that are to complete these")
        done = {run.seed: run for run in others.done(arm.name)}
        mine = results.runs[arm.name]
        results.runs[arm.name] = [done.get(run.seed, run) if run.status != "done" else run for run in mine]


def save(results: Results, path: Path) -> None:
    """Write ``results.json``."""
    data = {"format": FORMAT, **asdict(results)}
    write_text(path, json.dumps(data, allow_nan=False) + "\n")


def load(path: Path) -> Results:
    """Read what :func:`save` wrote.

    Raises:
        ConfigError: the file is missing, malformed or of another version.
    """
    data = _json(path)
    if data is None or data.pop("format", None) != FORMAT:
        raise ConfigError(f"{str(path)!r} is no results file of this version of tracefp4 compare")
    arms = [Arm(**{**arm, "settings": tuple(arm["settings"])}) for arm in data["arms"]]
    runs = {name: [_run(run) for run in members] for name, members in data["runs"].items()}
    return Results(data["task"], data["tables"], arms, runs, data["members"])


def _run(data: dict[str, Any]) -> RunResult:
    for name in ("first", "last", "best"):
        data[name] = None if data[name] is None else Evaluation(**data[name])
    data["curve"] = [(step, score) for step, score in data["curve"]]
    data["series"] = {name: Series(**series) for name, series in data["series"].items()}
    return RunResult(**data)


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    path = folder / "evaluations.jsonl"
    return [row for row in read_lines(path, []) if row.get("eval/scores")] if path.is_file() else []


def _whole(scores: list[float]) -> list[float]:
    """Scores of 0 and 1 as integers, which are most of the file."""
    return [int(score) if score == int(score) else score for score in scores]


def _rounded(series: Series) -> Series:
    """Five significant digits: enough for a plot, and half of the file."""
    return Series(series.steps, [float(f"{value:.5g}") for value in series.values if math.isfinite(value)])


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
