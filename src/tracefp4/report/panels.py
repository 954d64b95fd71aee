"""What is plotted: one small function a panel.

Each takes a run and returns a :class:`~tracefp4.report.figures.Panel`, or ``None`` when the run recorded none of its
metrics. ``PANELS`` is the order on the page; ``missing_metrics`` names what a run did not record.
"""

from __future__ import annotations

from collections.abc import Callable

from tracefp4.methods import METHODS
from tracefp4.report.figures import Line, Panel
from tracefp4.report.run_data import Run, Series

FLOOR_KEY = "mismatch_kl_floor"
"""Where a run's summary keeps the mismatch of two BF16 paths, if it was measured."""


def reward(run: Run) -> Panel | None:
    """Mean reward of the sampled responses, with held-out accuracy where it was measured."""
    train = run.series("reward/mean")
    window = smoothing(train)
    lines = _present([Line("training reward", train, "blue", smooth=window)])
    for colour, metric in zip(("green", "purple", "amber"), run.evaluations(), strict=False):
        label = "held-out pass@1" if len(run.evaluations()) == 1 else metric.split("/")[1]
        lines.append(Line(label, run.series(metric), colour, markers=True, bars=run.intervals(metric)))
    unit = f"reward a response; bold: mean of {window} steps" if window > 1 else "reward a response"
    return _panel("reward", "Reward", unit, lines)


def mismatch(run: Run) -> Panel | None:
    """How far trainer and rollout disagree on the tokens that the rollout sampled."""
    guided = run.series("mismatch_kl/mean")
    label = "guided" if is_guided(run) else "trainer vs rollout"
    lines = [
        Line(label, positive(guided), "blue", smooth=smoothing(guided)),
        Line("without guidance", positive(run.series("mismatch_kl_unguided/mean")), "orange", markers=True),
    ]
    panel = _panel("mismatch", "Train-rollout mismatch", "k3 divergence, nats a token, log scale", lines, log=True)
    floor = run.summary.get(FLOOR_KEY)
    if panel is not None and isinstance(floor, int | float) and floor > 0:
        panel.levels.append(("BF16 floor", float(floor)))
    return panel


def logprob_difference(run: Run) -> Panel | None:
    """Extremes of log p_train - log p_rollout: single tokens that the two sides see differently."""
    lines = [
        Line("largest", run.series("logprob_diff/max"), "blue"),
        Line("mean size", run.series("logprob_diff/mean_abs"), "green"),
        Line("smallest", run.series("logprob_diff/min"), "purple"),
    ]
    return _panel(
        "logprob_difference", "Log-prob difference", "log p(train) - log p(rollout), nats, single tokens", lines
    )


def entropy(run: Run) -> Panel | None:
    """Entropy of the policy on response tokens."""
    lines = [Line("", run.series("entropy"), "blue", smooth=smoothing(run.series("entropy")))]
    return _panel("entropy", "Entropy of the policy", "nats a response token", lines, zero=True)


def response_length(run: Run) -> Panel | None:
    """Mean length of the responses."""
    series = run.series("response_length/mean")
    lines = [Line("", series, "blue", smooth=smoothing(series))]
    return _panel("response_length", "Response length", "tokens a response", lines, zero=True)


def guidance_quality(run: Run) -> Panel | None:
    """How often the trainer's own rounding would have differed."""
    lines = [
        Line("codes", run.series("guidance/flip_rate"), "blue"),
        Line("block scales", run.series("guidance/scale_mismatch"), "orange"),
    ]
    unit = "share that the trainer alone would have rounded differently"
    return _panel("guidance_quality", "What guidance corrected", unit, lines, percent=True, zero=True)


def time_split(run: Run) -> Panel | None:
    """Where the seconds of a step go."""
    parts = [("rollout", "blue"), ("reward", "purple"), ("train", "orange"), ("sync", "green")]
    lines = _present([Line(part, run.series(f"time/{part}_s"), colour) for part, colour in parts])
    common = set.intersection(*(set(line.series.steps) for line in lines)) if lines else set()
    for line in lines:
        pairs = [(s, v) for s, v in zip(line.series.steps, line.series.values, strict=True) if s in common]
        line.series = Series([s for s, _ in pairs], [v for _, v in pairs])
    return _panel("time_split", "Time of a step", "seconds; labels: means of the run", lines, stacked=True)


def throughput(run: Run) -> Panel | None:
    """Tokens a second of the two sides."""
    lines = [
        Line("rollout", run.series("throughput/rollout_tok_s"), "blue"),
        Line("train", run.series("throughput/train_tok_s"), "orange"),
    ]
    return _panel("throughput", "Throughput", "tokens a second", lines, zero=True)


def gradient_norm(run: Run) -> Panel | None:
    """Norm of the gradient before clipping."""
    series = run.series("grad_norm")
    lines = [Line("", series, "blue", smooth=smoothing(series))]
    return _panel("gradient_norm", "Gradient norm", "before clipping", lines, zero=True)


PANELS: tuple[Callable[[Run], Panel | None], ...] = (
    reward,
    mismatch,
    logprob_difference,
    guidance_quality,
    entropy,
    response_length,
    gradient_norm,
    time_split,
    throughput,
)
"""Panels in the order of the page."""

_EXPECTED = (
    "reward/mean",
    "mismatch_kl/mean",
    "logprob_diff/max",
    "logprob_diff/min",
    "entropy",
    "response_length/mean",
    "grad_norm",
    "time/rollout_s",
    "time/train_s",
    "throughput/rollout_tok_s",
    "throughput/train_tok_s",
)
_EXPECTED_GUIDED = (
    "mismatch_kl_unguided/mean",
    "guidance/coverage",
    "guidance/bytes_per_token",
    "guidance/flip_rate",
    "guidance/scale_mismatch",
)


def missing_metrics(run: Run) -> list[str]:
    """Metrics that the page would show and the run did not record; guidance metrics count for guided runs only."""
    expected = _EXPECTED + (_EXPECTED_GUIDED if is_guided(run) else ())
    return [metric for metric in expected if not run.series(metric)]


def is_guided(run: Run) -> bool:
    """Whether the trainer of this run was to be guided, by its method or by what it recorded."""
    name = run.setting("method")
    return (name in METHODS and METHODS[name].guided) or bool(run.series("guidance/coverage"))


def smoothing(series: Series) -> int:
    """Window of the running mean: a tenth of the run, at most 20 steps; 1 (no smoothing) for short runs."""
    return max(1, min(20, len(series.steps) // 10))


def positive(series: Series) -> Series:
    """The part of a series that a logarithmic axis can show."""
    pairs = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if v > 0]
    return Series([s for s, _ in pairs], [v for _, v in pairs])


def _present(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.series]


def _panel(
    name: str,
    title: str,
    unit: str,
    lines: list[Line],
    *,
    log: bool = False,
    percent: bool = False,
    zero: bool = False,
    stacked: bool = False,
) -> Panel | None:
    lines = _present(lines)
    return Panel(name, title, unit, lines, log, percent, zero, stacked) if lines else None
