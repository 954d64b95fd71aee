"""The tables of a comparison: scores with their spread, differences to the reference with intervals, the mismatch.

A score is the mean over held-out items; of several seeds the mean and its standard error are given. A difference to
``bf16`` is taken item by item within a seed (both arms start from the same warm start and answer the same problems) and
its interval resamples seeds and items together (:func:`tracefp4.rl.statistics.crossed_bootstrap`). Runs whose warm
starts differ are not a pair: that is an error, not a footnote. Differences to any other arm are taken in the same way.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracefp4.errors import ConfigError, suggest
from tracefp4.report.arms import NVFP4, POSTHOC, REFERENCE, SPEC_NAMES, TABLE_TITLES, Arm
from tracefp4.report.figures import share_text
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
    """To the reference; ``None`` for the reference itself."""
    difference_interval: tuple[float | None, float | None]
    difference_seeds: int
    """Seeds that both have, over which the difference is taken."""
    against: float | None
    """Difference to the arm that was named for it; ``None`` for that arm."""
    against_interval: tuple[float | None, float | None]
    against_seeds: int
    gain: float | None
    """Score less that of the arm's own policy before RL, which a quantized arm may begin lower."""
    beyond: float | None
    """Gain less that of the reference; ``None`` for the reference itself."""
    beyond_interval: tuple[float | None, float | None]
    step: str
    """Evaluation that counts: the last step, or the best."""
    k3: float | None
    largest: float | None
    """Largest absolute log-prob difference of a token, over all steps and seeds."""
    tail: float | None
    """p99.9 of the absolute difference, mean over 20 steps, in the worst such window."""
    recorded: float | None
    """Bytes of guidance a token: frames, headers and what was pulled."""
    shipped: float | None
    """Bytes of guidance that left the engine, pulls included, spread over the same tokens."""
    saved: float | None
    """Share of the frames' bytes that never left the engine."""
    pulled: float | None
    """Share of the vectors whose bits a checked plan pulled."""
    failures: float | None
    """Share of 16-token chunks whose block scales were restored wrongly."""
    minutes: float | None


def headings(against: str = "") -> list[str]:
    """Headings of all columns, in the order of :func:`cells`; ``against`` is the arm of the second difference."""
    return [
        *("rollout", "method", "seeds", "score", "std. error", "95 % interval of the score"),
        *(f"difference to {REFERENCE}", f"95 % interval of the difference to {REFERENCE}"),
        *(f"difference to {against}", f"95 % interval of the difference to {against}"),
        *(
            "gain over its own start",
            f"gain beyond that of {REFERENCE}",
            f"95 % interval of the gain beyond {REFERENCE}",
        ),
        *("step", "mismatch k3", "largest log-prob difference", "p99.9 of it"),
        *("recorded bytes a token", "shipped bytes a token", "never shipped"),
        *("pulled", "scale checks failed", "minutes"),
    ]


def build(results: Results, table: str, against: str = "") -> list[Row]:
    """Rows of a table.

    Args:
        results: of the comparison.
        table: one of ``results.tables``.
        against: name of an arm whose difference is shown besides that to the reference; empty for none.

    Raises:
        ConfigError: two runs that would be paired have different warm starts, or there is no arm called ``against``.
    """
    if against and against not in results.runs:
        raise ConfigError(f"no arm of this comparison is called {against!r}{suggest(against, results.runs)}")
    names = results.members[table]
    best = table == "t6"
    rows = [
        arm_row(results, results.arm(name), best=best and name.startswith("tis_sc"), against=against) for name in names
    ]
    if table == "t7" and REFERENCE in names:
        found = (posthoc_row(results, results.arm(REFERENCE), method, against=against) for method in POSTHOC)
        rows[1:1] = [row for row in found if row is not None]
    return rows


def arm_row(results: Results, arm: Arm, *, best: bool = False, against: str = "") -> Row:
    """The line of an arm, at its last evaluation or its best one."""
    runs = results.done(arm.name)
    scores = {run.seed: (run.best if best else run.last) for run in runs}
    step = " / ".join(sorted({str(e.step) for e in scores.values() if e}, key=int))
    table = {seed: e.scores for seed, e in scores.items() if e is not None}
    # At its best an arm may be another policy than the one that it is compared with as the reference.
    same = {arm.name} if not best else set[str]()
    return _row(results, arm, arm.label, table, f"best, at step {step}" if best and step else step, runs, same, against)


def posthoc_row(results: Results, arm: Arm, method: str, *, against: str = "") -> Row | None:
    """The line of a post-hoc quantization of an arm's final policy."""
    runs = [run for run in results.done(arm.name) if method in run.posthoc]
    if not runs:
        return None
    table = {run.seed: run.posthoc[method] for run in runs}
    row = _row(results, arm, f"{arm.method}, then {method}", table, str(runs[0].steps), [], set(), against)
    return replace(row, spec=SPEC_NAMES[NVFP4])


def _row(
    results: Results,
    arm: Arm,
    label: str,
    scores: dict[int, list[float]],
    step: str,
    runs: Sequence[RunResult],
    same: Collection[str],
    against: str,
) -> Row:
    """A line; ``same`` names the arms that it is itself, to which it has no difference."""
    sizes = sorted({len(values) for values in scores.values()})
    if len(sizes) > 1:
        raise ConfigError(f"runs of arm {arm.name!r} were evaluated on different items: {sizes} of them")
    failed = sum(run.status == "failed" for run in results.runs[arm.name])
    spec = SPEC_NAMES.get(arm.spec, arm.spec)
    own = _points(crossed_bootstrap(list(scores.values()))) if scores else None
    difference = paired(results, arm, scores, REFERENCE) if scores and REFERENCE not in same else None
    second = paired(results, arm, scores, against) if scores and against and against not in same else None
    gains = _gains(runs, scores)
    gain = _points(crossed_bootstrap(list(gains.values()))) if gains else None
    beyond = _beyond(results, gains) if REFERENCE not in same else None
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
        difference_seeds=0 if difference is None else len(_common(results, scores, REFERENCE)),
        against=None if second is None else second.estimate,
        against_interval=(None, None) if second is None else (second.low, second.high),
        against_seeds=0 if second is None else len(_common(results, scores, against)),
        gain=None if gain is None else gain.estimate,
        beyond=None if beyond is None else beyond.estimate,
        beyond_interval=(None, None) if beyond is None else (beyond.low, beyond.high),
        step=step,
        k3=_metric(runs, "mismatch_kl/mean"),
        largest=largest(runs),
        tail=max((worst_window(run) for run in runs if "logprob_diff/p999" in run.series), default=None),
        recorded=_metric(runs, "guidance/bytes_per_token"),
        shipped=_metric(runs, "guidance/shipped_bytes_per_token"),
        saved=_metric(runs, "guidance/saved_share"),
        pulled=_metric(runs, "guidance/pulled_share"),
        failures=_metric(runs, "guidance/scale_check_failures"),
        minutes=_mean([run.seconds / 60 for run in runs]),
    )


def paired(results: Results, arm: Arm, scores: dict[int, list[float]], other: str) -> Interval | None:
    """Difference to the last evaluation of ``other`` over the seeds and items that both have, in points.

    Args:
        results: of the comparison.
        arm: whose runs were scored.
        scores: by seed and item.
        other: name of the arm that is subtracted.

    Returns:
        ``None`` where the two have no seed in common, or ``other`` is not in the comparison.

    Raises:
        ConfigError: warm starts or items differ.
    """
    if other not in results.runs:
        return None
    mine = {run.seed: run for run in results.runs[arm.name]}
    table = []
    for run in _common(results, scores, other):
        theirs, ours = run.warm_start, mine[run.seed].warm_start
        if theirs != ours:
            raise ConfigError(
                f"arms {arm.name!r} and {other!r} cannot be paired: with seed {run.seed} the warm starts are "
                f"{ours or 'unknown'} and {theirs or 'unknown'}; run both from one configuration on one kind of device"
            )
        values, base = scores[run.seed], run.last.scores if run.last is not None else []
        if len(values) != len(base):
            raise ConfigError(f"arm {arm.name!r} was evaluated on {len(values)} items, {other!r} on {len(base)}")
        table.append([a - b for a, b in zip(values, base, strict=True)])
    return _points(crossed_bootstrap(table)) if table else None


def _gains(runs: Sequence[RunResult], scores: dict[int, list[float]]) -> dict[int, list[float]]:
    """What each item gained since the first evaluation of its run, by seed; runs without one are left out."""
    found: dict[int, list[float]] = {}
    for run in runs:
        before, after = run.first.scores if run.first is not None else [], scores.get(run.seed, [])
        if after and len(before) == len(after):
            found[run.seed] = [b - a for a, b in zip(before, after, strict=True)]
    return found


def _beyond(results: Results, gains: dict[int, list[float]]) -> Interval | None:
    """Gains less those of the reference, over the seeds and items that both have, in points."""
    runs = results.done(REFERENCE) if REFERENCE in results.runs else []
    base = _gains(runs, {run.seed: run.last.scores for run in runs if run.last is not None})
    table = [
        [a - b for a, b in zip(gains[seed], base[seed], strict=True)]
        for seed in gains
        if seed in base and len(base[seed]) == len(gains[seed])
    ]
    return _points(crossed_bootstrap(table)) if table else None


def _common(results: Results, scores: dict[int, list[float]], other: str) -> list[RunResult]:
    """Finished runs of ``other`` with the seeds that were scored."""
    return [run for run in results.done(other) if run.seed in scores]


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
    """A row as text, in the order of :func:`headings`."""
    seeds = f"{row.seeds}" + (f" ({row.failed} failed)" if row.failed else "")
    return [
        row.spec,
        row.method,
        seeds,
        _number(row.score, 1),
        _number(row.error, 1),
        _range(row.interval),
        *(_signed(row.difference, row.difference_seeds, row.seeds), _range(row.difference_interval)),
        *(_signed(row.against, row.against_seeds, row.seeds), _range(row.against_interval)),
        *(_signed(row.gain, 0, 0), _signed(row.beyond, 0, 0), _range(row.beyond_interval)),
        row.step,
        _number(row.k3, None),
        _number(row.largest, 2),
        _number(row.tail, 3),
        *(_number(row.recorded, 0), _number(row.shipped, 0)),
        *("" if share is None else share_text(share) for share in (row.saved, row.pulled, row.failures)),
        _number(row.minutes, 1),
    ]


def used(rows: Sequence[Row], against: str = "") -> tuple[list[str], list[list[str]]]:
    """Headings and cells without the columns that no row fills."""
    body = [cells(row) for row in rows]
    names = headings(against)
    kept = [i for i in range(len(names)) if any(line[i] for line in body)]
    return [names[i] for i in kept], [[line[i] or "-" for i in kept] for line in body]


def markdown(results: Results, table: str, rows: Sequence[Row], against: str = "") -> str:
    """A table with its title as Markdown."""
    head, body = used(rows, against)
    lines = [f"### {TABLE_TITLES[table]}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in body]
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


def _metric(runs: Sequence[RunResult], name: str) -> float | None:
    """Mean over steps, then over runs."""
    return _mean([run.series[name].mean() for run in runs if name in run.series])


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None, digits: int | None) -> str:
    if value is None:
        return ""
    return f"{value:.1e}" if digits is None else f"{value:,.{digits}f}".replace(",", " ")


def _signed(difference: float | None, common: int, seeds: int) -> str:
    """A difference, and of how many seeds it is where it is not of all that the row has."""
    where = f" ({common} of {seeds} seeds)" if common != seeds else ""
    return "" if difference is None else f"{difference:+.1f}{where}"


def _range(interval: tuple[float | None, float | None]) -> str:
    low, high = interval
    return "" if low is None or high is None else f"{low:.1f} to {high:.1f}"
