"""The figures of the paper, drawn for our model from the results of a comparison.

======  ===============================================================================================================
figure  shows
======  ===============================================================================================================
fig1    largest and smallest log-prob difference of a token between trainer and rollout, by step and method
fig4    why earlier methods fall behind: their mismatch and the tail of their log-prob differences
fig6    by how many codebook entries trainer and rollout activations differ, with and without guidance
fig7    the FP4 policy adapting: held-out score by step, beside the bfloat16 policy and what quantizing it costs
fig8    reward, held-out score, entropy and response length by step
fig10   where the time of a rollout goes
fig11   as fig1 under the other specs
======  ===============================================================================================================

Figure 14, throughput by precision, comes from a benchmark instead (:mod:`tracefp4.report.throughput`).

A bold line is the mean over seeds, thin ones are the seeds. A figure whose data were not recorded is left out, and the
page says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracefp4.report.arms import POSTHOC, REFERENCE, SPEC_NAMES, Arm, to_probe
from tracefp4.report.bars import Bars, draw_bars
from tracefp4.report.compare import mean_series
from tracefp4.report.figures import SERIES_COLOURS, Line, Panel, draw
from tracefp4.report.panels import positive, smoothing
from tracefp4.report.results import Results, RunResult
from tracefp4.report.run_data import Series
from tracefp4.report.tables import WINDOW

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROFILE_PARTS = {
    "forward": "forward",
    "kv_dequantization": "KV dequantization",
    "wa_guidance": "W/A guidance",
    "kv_guidance": "KV guidance",
    "frames": "frames",
}
COLOURS = {
    "bf16": "ink",
    "qat": "orange",
    "qat_w4a16": "sky",
    "qarl": "purple",
    "quads": "amber",
    "tis_sc": "green",
    "trace": "blue",
}
"""A method has one colour in every figure; the reference has one that no other arm is given."""
MOST = len(SERIES_COLOURS)
"""Arms besides the reference that a figure can tell apart."""
THRESHOLD = 0.1
"""Nats: extremes of the log-prob difference are drawn linearly below."""


@dataclass(slots=True)
class Drawing:
    """One finished figure."""

    name: str
    title: str
    figure: Figure


def draw_all(results: Results) -> tuple[list[Drawing], list[str]]:
    """Draw every figure that has data; the rest is named in the notes."""
    drawings, notes = [], []
    for name, (title, build) in FIGURES.items():
        figure = build(results)
        if figure is None:
            notes.append(f"{name} ({title}) is left out: its data were not recorded.")
        else:
            drawings.append(Drawing(name, title, figure))
    table, left = results.leading, [arm.name for arm in _of_table(results)[_limit(_of_table(results)) :]]
    if left:
        notes.append(f"Curves show {MOST} arms of table {table} beside {REFERENCE}; left out: {', '.join(left)}.")
    return drawings, notes


def _of_table(results: Results) -> list[Arm]:
    """Finished arms of the leading table, under the first of its specs; those in bfloat16 go with any."""
    arms = [results.arm(name) for name in results.members[results.leading] if results.done(name)]
    specs = [arm.spec for arm in arms if arm.spec != "bf16"]
    return [arm for arm in arms if arm.spec in ("bf16", *specs[:1])]


def _limit(arms: Sequence[Arm]) -> int:
    """How many of ``arms`` have colours of their own; the reference's is counted besides."""
    return MOST + any(arm.name == REFERENCE for arm in arms[: MOST + 1])


def _dynamics(results: Results) -> list[Arm]:
    """Arms whose curves are drawn together."""
    arms = _of_table(results)
    return arms[: _limit(arms)]


def _colours(arms: Sequence[Arm]) -> dict[str, str]:
    """A colour for each of up to :data:`MOST` arms and the reference, by name: its method's, or one that is free."""
    colours: dict[str, str] = {}
    for arm in arms:
        colour = COLOURS.get(arm.name.partition("@")[0])
        if colour is not None and colour not in colours.values():
            colours[arm.name] = colour
    free = [colour for colour in SERIES_COLOURS if colour not in colours.values()] or list(SERIES_COLOURS)
    others = [arm.name for arm in arms if arm.name not in colours]
    return colours | {name: free[index % len(free)] for index, name in enumerate(others)}


def _titles(arms: Sequence[Arm]) -> dict[str, str]:
    """What curves are called, by name of their arm: the method, and its plan where several arms have that method."""
    methods = [arm.method for arm in arms]
    return {arm.name: arm.label if methods.count(arm.method) > 1 else arm.method for arm in arms}


def _probed(results: Results, kind: Callable[[RunResult], object]) -> tuple[Arm, RunResult] | None:
    """The run whose measurement or profile is drawn, as :func:`~tracefp4.report.arms.to_probe` ranks its arm."""
    found = [(arm, run) for arm in results.arms for run in results.runs[arm.name] if kind(run)]
    first = to_probe([arm for arm, _ in found])
    return next(((arm, run) for arm, run in found if first in (arm, None)), None)


def _place(arm: Arm) -> str:
    """Arm, spec and plan of a probe."""
    plan = f", plan {arm.plan}" if arm.plan else ""
    return f"arm {arm.name}: {SPEC_NAMES.get(arm.spec, arm.spec)}{plan}"


def _runs(results: Results, arms: Sequence[Arm], arm: Arm) -> list[RunResult]:
    """Finished runs of an arm with the seeds that all ``arms`` have finished; all of its runs where there are none.

    Seeds start from warm starts of different quality: a mean over other seeds than those of its neighbours misleads.
    """
    shared = set.intersection(*({run.seed for run in results.done(one.name)} for one in arms))
    runs = results.done(arm.name)
    return [run for run in runs if run.seed in shared] or runs


def _lines(results: Results, arms: Sequence[Arm], metric: str, *, log: bool = False, window: int = 0) -> list[Line]:
    lines: list[Line] = []
    colours, titles = _colours(arms), _titles(arms)
    for arm in arms:
        colour = colours[arm.name]
        members = [run.series[metric] for run in _runs(results, arms, arm) if metric in run.series]
        members = [positive(series) if log else series for series in members]
        members = [series for series in members if series]
        if not members:
            continue
        mean = mean_series(members)
        if len(members) > 1:
            lines += [Line("", series, colour, faint=True) for series in members]
        lines.append(Line(titles[arm.name], mean, colour, smooth=window or smoothing(mean)))
    return lines


def _panel(
    name: str,
    title: str,
    unit: str,
    lines: list[Line],
    *,
    log: bool = False,
    zero: bool = False,
    symlog: float = 0.0,
) -> list[Panel]:
    return [Panel(name, title, unit, lines, log=log, zero=zero, symlog=symlog)] if lines else []


def _curves(results: Results, arms: Sequence[Arm]) -> list[Line]:
    """Held-out score by step."""
    lines = []
    colours, titles = _colours(arms), _titles(arms)
    for arm in arms:
        runs = _runs(results, arms, arm)
        members = [Series([s for s, _ in run.curve], [v for _, v in run.curve]) for run in runs]
        members = [series for series in members if series]
        if members:
            lines.append(Line(titles[arm.name], mean_series(members), colours[arm.name], markers=True))
    return lines


def extremes(results: Results) -> Figure | None:
    """Figure 1."""
    panels = _extreme_panels(results, _dynamics(results), "")
    return draw(panels, columns=2) if panels else None


def _extreme_panels(results: Results, arms: Sequence[Arm], where: str) -> list[Panel]:
    panels = []
    for end, word in (("max", "Largest"), ("min", "Smallest")):
        lines = _lines(results, arms, f"logprob_diff/{end}")
        title = f"{word} log-prob difference{where}"
        unit = f"log p(train) - log p(rollout), nats, one token a step; log scale beyond {THRESHOLD}"
        panels += _panel(f"{end}", title, unit, lines, symlog=THRESHOLD)
    return panels


def problem(results: Results) -> Figure | None:
    """Figure 4."""
    arms = _dynamics(results)
    tail = _lines(results, arms, "logprob_diff/p999", log=True, window=WINDOW)
    panels = _panel(
        "k3", "Train-rollout mismatch", "k3 divergence, nats a token, log scale",
        _lines(results, arms, "mismatch_kl/mean", log=True), log=True,
    )  # fmt: skip
    unit = f"p99.9 of the absolute difference, nats; bold: mean of {WINDOW} steps, log scale"
    panels += _panel("tail", "Tail of the log-prob difference", unit, tail, log=True)
    return draw(panels, columns=2) if panels else None


def dynamics(results: Results) -> Figure | None:
    """Figure 8."""
    arms = _dynamics(results)
    panels = _panel("reward", "Reward", "training, a response", _lines(results, arms, "reward/mean"))
    panels += _panel("eval", "Held-out score", "the policy as it is deployed, unguided", _curves(results, arms))
    panels += _panel("entropy", "Entropy", "nats a response token", _lines(results, arms, "entropy"), zero=True)
    panels += _panel("length", "Response length", "tokens", _lines(results, arms, "response_length/mean"), zero=True)
    return draw(panels, columns=2) if panels else None


def adaptation(results: Results) -> Figure | None:
    """Figure 7."""
    wanted = [a for a in _dynamics(results) if a.name == REFERENCE or a.name.partition("@")[0] == "trace"]
    lines = _curves(results, wanted)
    if not any(len(line.series.steps) > 1 for line in lines):
        return None
    panel = Panel("adaptation", "The policy adapts to FP4", "held-out score, bf16 in BF16, trace in FP4", lines)
    for method in POSTHOC:
        found = [run.posthoc[method] for run in results.done(REFERENCE) if method in run.posthoc]
        if found and method in ("nvfp4", "hscale"):
            level = sum(sum(scores) / len(scores) for scores in found) / len(found)
            panel.levels.append((f"bf16, then {method}", level))
    return draw([panel], size=(7.4, 3.4))


def codebook_steps(results: Results) -> Figure | None:
    """Figure 6."""
    found = _probed(results, lambda run: run.measure)
    if found is None:
        return None
    arm, run = found
    rows = [row for row in (run.measure or {}).get("rows", []) if row.get("code_steps") and row["route_replay"]]
    shown = {row["name"]: row for row in reversed(rows) if row["name"] in ("qat", "guided")}
    if not shown:
        return None
    # Most codes agree; what differs is what the figure is about.
    groups = ["1 entry", "2", "3", "4 or more"]
    names = {"qat": "own rounding", "guided": f"guided, {shown.get('guided', {}).get('plan')}"}
    series = [(names[key], shown[key]["code_steps"][1:]) for key in ("qat", "guided") if key in shown]
    unit = f"share of all codes that differ from the rollout's, by distance in codebook entries\n{_place(arm)}"
    colours = tuple(COLOURS[key] for key in ("qat", "trace"))
    return draw_bars(Bars("steps", "How far apart the codes are", unit, groups, series, colours=colours))


def time_split(results: Results) -> Figure | None:
    """Figure 10."""
    found = _probed(results, lambda run: run.profile)
    if found is None:
        return None
    arm, run = found
    shares = (run.profile or {})["shares"]
    device = run.environment.get("device", "").partition(";")[0]
    parts = [(label, [shares.get(name, 0.0)]) for name, label in PROFILE_PARTS.items()]
    unit = f"share of a decode step, from differences of steps{f'; {device}' if device else ''}\n{_place(arm)}"
    return draw_bars(Bars("time", "Time of a rollout", unit, ["rollout"], parts, stacked=True))


def other_specs(results: Results) -> Figure | None:
    """Figure 11."""
    main = {"bf16", *(arm.spec for arm in _dynamics(results))}
    panels: list[Panel] = []
    for spec in sorted({arm.spec for arm in results.arms} - main):
        arms = [results.arm(REFERENCE)] if REFERENCE in results.runs and results.done(REFERENCE) else []
        arms += [arm for arm in results.arms if arm.spec == spec and results.done(arm.name)][:MOST]
        if len(arms) > 1:
            panels += _extreme_panels(results, arms, f", {SPEC_NAMES.get(spec, spec)}")
    return draw(panels, columns=2) if panels else None


FIGURES: dict[str, tuple[str, Callable[[Results], Figure | None]]] = {
    "fig1": ("Largest and smallest log-prob difference", extremes),
    "fig4": ("Mismatch of the methods", problem),
    "fig6": ("Distance of codes in codebook entries", codebook_steps),
    "fig7": ("Adaptation to FP4", adaptation),
    "fig8": ("Training dynamics", dynamics),
    "fig10": ("Time of a rollout by part", time_split),
    "fig11": ("Log-prob difference under the other specs", other_specs),
}
"""Title and builder of each figure, in the order of the page."""
