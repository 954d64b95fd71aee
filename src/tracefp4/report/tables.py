"""The tables of a comparison: scores with their spread, differences to the reference with intervals, the mismatch.

A score is the mean over held-out items; of several seeds the mean and its standard error are given. A difference to
``bf16`` is taken item by item within a seed (both arms start from the same warm start and answer the same problems) and
its interval resamples seeds and items together (:func:`tracefp4.rl.statistics.crossed_bootstrap`). Runs whose warm
starts differ are not a pair: that is an error, not a footnote.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracefp4.errors import ConfigError
from tracefp4.report.arms import POSTHOC, REFERENCE, SPEC_NAMES, TABLE_TITLES, Arm
from tracefp4.report.results import Evaluation, Results, RunResult
from tracefp4.rl.statistics import Interval, crossed_bootstrap

WINDOW = 20
"""Steps over which the tail of the log-prob difference is averaged."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table. Scores are in points of 100; ``None`` where there is nothing to say."""

    spec: str
    method: str
    seeds: int
    failed: int
    score: float | None
    error: float | None
    """Standard error over seeds; ``None`` for one seed."""
    interval: tuple[float | None, float | None]
    difference: float | None
    difference_interval: tuple[float | None, float | None]
    step: str
    """Evaluation that counts: the last step, or the best."""
    k3: float | None
    largest: float | None
    """Largest absolute log-prob difference of a token, over all steps and seeds."""
    tail: float | None
    """p99.9 of the absolute difference, mean over 20 steps, in the worst such window."""
    bytes_per_token: float | None
    minutes: float | None


HEADINGS = (
    *("rollout", "method", "seeds", "score", "std. error", "95 % interval", "difference to bf16", "95 % interval"),
    *("step", "mismatch k3", "largest log-prob difference", "p99.9 of it", "bytes a token", "minutes"),
)


def build(results: Results, table: str) -> list[Row]:
    """Rows of a table.

    Raises:
        ConfigError: two runs that would be paired have different warm starts.
    """
    names = results.members[table]
    best = table == "t6"
    rows = [arm_row(results, results.arm(name), best=best and name.startswith("tis_sc")) for name in names]
    if table == "t7" and REFERENCE in names:
        reference = results.arm(REFERENCE)
        rows[1:1] = [row for method in POSTHOC if (row := posthoc_row(results, reference, method)) is not None]
    return rows


def arm_row(results: Results, arm: Arm, *, best: bool = False) -> Row:
    """The line of an arm, at its last evaluation or its best one."""
    runs = results.done(arm.name)
    scores = {run.seed: (run.best if best else run.last) for run in runs}
    step = " / ".join(sorted({str(e.step) for e in scores.values() if e}, key=int))
    table = {seed: e.scores for seed, e in scores.items() if e is not None}
    return _row(results, arm, arm.label, table, f"best of {step}" if best and step else step, runs)


def posthoc_row(results: Results, arm: Arm, method: str) -> Row | None:
    """The line of a post-hoc quantization of an arm's final policy."""
    runs = [run for run in results.done(arm.name) if method in run.posthoc]
    if not runs:
        return None
    table = {run.seed: run.posthoc[method] for run in runs}
    row = _row(results, arm, f"{arm.method}, then {method}", table, str(runs[0].steps), [])
    return Row(**{**{n: getattr(row, n) for n in Row.__slots__}, "spec": SPEC_NAMES["nvfp4-w4a4-kv4"]})


def _row(
    results: Results, arm: Arm, label: str, scores: dict[int, list[float]], step: str, runs: Sequence[RunResult]
) -> Row:
    sizes = sorted({len(values) for values in scores.values()})
    if len(sizes) > 1:
        raise ConfigError(f"runs of arm {arm.name!r} were evaluated on different items: {sizes} of them")
    failed = sum(run.status == "failed" for run in results.runs[arm.name])
    spec = SPEC_NAMES.get(arm.spec, arm.spec)
    own = _points(crossed_bootstrap(list(scores.values()))) if scores else None
    difference = None if own is None else paired(results, arm, scores)
    means = [100 * sum(values) / len(values) for values in scores.values()]
    error = float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None
    return Row(
        spec=spec,
        method=label,
        seeds=len(scores),
        failed=failed,
        score=None if own is None else own.estimate,
        error=error,
        interval=(None, None) if own is None else (own.low, own.high),
        difference=None if difference is None else difference.estimate,
        difference_interval=(None, None) if difference is None else (difference.low, difference.high),
        step=step,
        k3=_mean([run.series["mismatch_kl/mean"].mean() for run in runs if "mismatch_kl/mean" in run.series]),
        largest=largest(runs),
        tail=max((worst_window(run) for run in runs if "logprob_diff/p999" in run.series), default=None),
        bytes_per_token=_mean(
            [run.series["guidance/bytes_per_token"].mean() for run in runs if "guidance/bytes_per_token" in run.series]
        ),
        minutes=_mean([run.seconds / 60 for run in runs]),
    )


def paired(results: Results, arm: Arm, scores: dict[int, list[float]]) -> Interval | None:
    """Difference to the reference over the seeds and items that both have, in points; ``None`` for the reference.

    Raises:
        ConfigError: warm starts or items differ.
    """
    if REFERENCE not in results.runs:
        return None
    mine = {run.seed: run for run in results.runs[arm.name]}
    table = []
    for reference in results.done(REFERENCE):
        if reference.seed not in scores or reference.last is None:
            continue
        theirs, ours = reference.warm_start, mine[reference.seed].warm_start
        if theirs != ours:
            raise ConfigError(
                f"arms {arm.name!r} and {REFERENCE!r} cannot be paired: with seed {reference.seed} the warm starts are "
                f"{ours or 'unknown'} and {theirs or 'unknown'}; run both from one configuration on one kind of device"
            )
        values, base = scores[reference.seed], reference.last.scores
        if len(values) != len(base):
            raise ConfigError(f"arm {arm.name!r} was evaluated on {len(values)} items, {REFERENCE!r} on {len(base)}")
        table.append([a - b for a, b in zip(values, base, strict=True)])
    same = arm.name == REFERENCE and table and not any(any(row) for row in table)
    return _points(crossed_bootstrap(table)) if table and not same else None


def worst_window(run: RunResult, window: int = WINDOW) -> float:
    """Largest mean over ``window`` consecutive steps of the run's p99.9 of the absolute log-prob difference."""
    values = run.series["logprob_diff/p999"].values
    size = min(window, len(values))
    return max(sum(values[i : i + size]) / size for i in range(len(values) - size + 1))


def largest(runs: Sequence[RunResult]) -> float | None:
    """Largest absolute log-prob difference of a token."""
    ends = [abs(v) for run in runs for n in ("max", "min") for v in run.series.get(f"logprob_diff/{n}", _NONE).values]
    return max(ends, default=None)


def learned(first: Evaluation, last: Evaluation) -> Interval:
    """How much the policy gained on held-out items, in points, with an interval over items."""
    return _points(crossed_bootstrap([[b - a for a, b in zip(first.scores, last.scores, strict=True)]]))


def cells(row: Row) -> list[str]:
    """A row as text, in the order of :data:`HEADINGS`."""
    seeds = f"{row.seeds}" + (f" ({row.failed} failed)" if row.failed else "")
    return [
        row.spec,
        row.method,
        seeds,
        _number(row.score, 1),
        _number(row.error, 1),
        _range(row.interval),
        "" if row.difference is None else f"{row.difference:+.1f}",
        _range(row.difference_interval),
        row.step,
        _number(row.k3, None),
        _number(row.largest, 2),
        _number(row.tail, 3),
        _number(row.bytes_per_token, 0),
        _number(row.minutes, 1),
    ]


def markdown(results: Results, table: str, rows: Sequence[Row]) -> str:
    """A table with its title as Markdown."""
    lines = [f"### {TABLE_TITLES[table]}", "", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    return "\n".join([*lines, "", f"Score: mean over held-out items of {results.task}, in points of 100.", ""])


def to_csv(rows: Sequence[Row]) -> str:
    """A table as CSV, numbers unrounded."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*Row.__slots__])
    for row in rows:
        values = [getattr(row, name) for name in Row.__slots__]
        writer.writerow([f"{v[0]};{v[1]}" if isinstance(v, tuple) else "" if v is None else v for v in values])
    return buffer.getvalue()


class _Empty:
    values: tuple[float, ...] = ()


_NONE = _Empty()


def _points(found: Interval) -> Interval:
    low, high = (None if v is None else 100 * v for v in (found.low, found.high))
    return Interval(100 * found.estimate, low, high, found.confidence, found.clusters, found.method)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None, digits: int | None) -> str:
    if value is None:
        return ""
    return f"{value:.1e}" if digits is None else f"{value:,.{digits}f}".replace(",", " ")


def _range(interval: tuple[float | None, float | None]) -> str:
    low, high = interval
    return "" if low is None or high is None else f"{low:.1f} to {high:.1f}"
