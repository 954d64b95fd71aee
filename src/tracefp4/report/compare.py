"""The page of several runs side by side.

Runs of one label (by default the method) are seeds of the same thing: they share a colour, each is a thin line, and
their mean over the steps that all of them have is the bold one. The table gives every run a row of its own, so that no
average hides a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tracefp4.errors import ConfigError
from tracefp4.report import figures, html
from tracefp4.report.figures import SERIES_COLOURS, Line, Panel, short
from tracefp4.report.headline import data_size, headline, share
from tracefp4.report.panels import positive, smoothing
from tracefp4.report.run_data import Run, Series, read_run
from tracefp4.report.run_report import flatten, write_text

_OVERLAYS: tuple[tuple[str, str, str, str], ...] = (
    ("reward/mean", "Reward", "reward a response, training", ""),
    ("mismatch_kl/mean", "Train-rollout mismatch", "k3 divergence, nats a token, log scale", "log"),
    ("logprob_diff/max", "Largest log-prob difference", "nats, single token of a step", "zero"),
    ("entropy", "Entropy of the policy", "nats a response token", "zero"),
    ("response_length/mean", "Response length", "tokens a response", "zero"),
    ("throughput/rollout_tok_s", "Rollout throughput", "tokens a second", "zero"),
)


def compare_runs(
    folders: Sequence[str | Path],
    out: str | Path,
    labels: Sequence[str] | None = None,
    images: str | Path | None = None,
) -> Path:
    """Write the page of several runs.

    Args:
        folders: run folders.
        out: file to write.
        labels: one label a run; runs with the same label are seeds of one arm. By default each run's ``method``.
        images: folder for the plots as PNG files, besides the page.

    Returns:
        The path of the page.

    Raises:
        ConfigError: fewer than two runs, a run that cannot be read, labels that do not fit, or more than six arms.
    """
    if len(folders) < 2:
        raise ConfigError(f"a comparison needs at least 2 runs, got {len(folders)}")
    if labels is not None and len(labels) != len(folders):
        raise ConfigError(f"{len(labels)} labels were given for {len(folders)} runs")
    runs = [read_run(folder) for folder in folders]
    names = list(labels) if labels is not None else [str(run.setting("method", run.name)) for run in runs]
    arms = group(runs, names)
    write_text(Path(out), render(arms))
    if images is not None:
        _write_images(arms, Path(images))
    return Path(out)


def group(runs: Sequence[Run], names: Sequence[str]) -> dict[str, list[Run]]:
    """Runs by label, in the order in which the labels first appear."""
    arms: dict[str, list[Run]] = {}
    for name, run in zip(names, runs, strict=True):
        arms.setdefault(name, []).append(run)
    if len(arms) > len(SERIES_COLOURS):
        raise ConfigError(f"a comparison shows at most {len(SERIES_COLOURS)} arms, got {len(arms)}: {', '.join(arms)}")
    return arms


def render(arms: dict[str, list[Run]]) -> str:
    """The page as text."""
    runs = [run for members in arms.values() for run in members]
    panels = overlays(arms)
    plots = [(panel.title, figures.to_svg(figures.draw([panel]), f"compare-{panel.name}")) for panel in panels]
    colours = list(zip(arms, SERIES_COLOURS, strict=False))
    head, rows = _table(arms)
    sections = [
        html.legend(colours),
        html.table(head, rows, numbers=range(1, len(head))),
        html.plots(plots),
        html.section("Settings that differ", _differences(arms)),
        html.section("Notes", html.notes([f"{run.name}: {note}" for run in runs for note in run.notes])),
    ]
    about = f"{len(runs)} runs; thin lines are runs, bold ones the mean of an arm"
    return html.page("Comparison: " + ", ".join(arms), about, sections)


def overlays(arms: dict[str, list[Run]]) -> list[Panel]:
    """Panels with one bold line an arm; a metric that no run has makes no panel."""
    tasks = sorted({metric for members in arms.values() for run in members for metric in run.evaluations()})
    evaluations = [(metric, f"Held-out {metric.split('/')[1]}", "pass@1", "") for metric in tasks]
    panels = []
    for metric, title, unit, scale in (_OVERLAYS[0], *evaluations, *_OVERLAYS[1:]):
        lines: list[Line] = []
        for (name, members), colour in zip(arms.items(), SERIES_COLOURS, strict=False):
            lines += _arm_lines(name, [run.series(metric) for run in members], colour, scale == "log", metric in tasks)
        if lines:
            log, zero = scale == "log", scale == "zero"
            panels.append(Panel(metric.replace("/", "_"), title, unit, lines, log=log, zero=zero))
    return panels


def mean_series(members: Sequence[Series]) -> Series:
    """Mean over several series at the steps that all of them have."""
    tables = [dict(zip(series.steps, series.values, strict=True)) for series in members]
    common = sorted(set.intersection(*(set(values) for values in tables))) if tables else []
    return Series(common, [sum(values[step] for values in tables) / len(tables) for step in common])


def _arm_lines(name: str, members: list[Series], colour: str, log: bool, markers: bool) -> list[Line]:
    members = [positive(series) if log else series for series in members]
    members = [series for series in members if series]
    if not members:
        return []
    mean = mean_series(members)
    thin = [Line("", series, colour, faint=True) for series in members] if len(members) > 1 else []
    return thin + (
        [Line(name, mean, colour, smooth=1 if markers else smoothing(mean), markers=markers)] if mean else []
    )


def _table(arms: dict[str, list[Run]]) -> tuple[list[str], list[list[str]]]:
    """Headline numbers, a row a run; columns that no run fills are left out."""
    columns = ["run", "steps", "reward first", "reward last", "held-out first", "held-out last", "mismatch (k3)"]
    columns += ["unguided", "a token", "coverage", "rollout tok/s", "s a step"]
    rows: list[list[str]] = []
    for name, members in arms.items():
        for run in members:
            head = headline(run)
            numbers = (head.mismatch, head.unguided)
            held = ["; ".join(item[index] for item in head.evaluations) for index in (1, 2)]
            rows.append(
                [
                    f"{name} ({run.name})",
                    str(head.steps),
                    *("" if value is None else short(value) for value in (head.reward_first, head.reward_last)),
                    *held,
                    *("" if value is None else short(value) for value in numbers),
                    "" if head.bytes_per_token is None else data_size(head.bytes_per_token),
                    "" if head.coverage is None else share(head.coverage),
                    *("" if value is None else short(value) for value in (head.rollout_speed, head.step_seconds)),
                ]
            )
    used = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    return [columns[index] for index in used], [[row[index] or "-" for index in used] for row in rows]


def _differences(arms: dict[str, list[Run]]) -> str:
    labelled = [(f"{name} ({run.name})", flatten(run.config)) for name, members in arms.items() for run in members]
    keys = sorted({key for _, settings in labelled for key in settings if key != "output_dir"})
    rows = [[key, *(str(settings.get(key, "-")) for _, settings in labelled)] for key in keys]
    return html.table(["setting", *(name for name, _ in labelled)], [row for row in rows if len(set(row[1:])) > 1])


def _write_images(arms: dict[str, list[Run]], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for panel in overlays(arms):
            (folder / f"compare_{panel.name}.png").write_bytes(figures.to_png(figures.draw([panel])))
    except OSError as error:
        raise ConfigError(f"images cannot be written to {str(folder)!r}: {error.strerror}") from error
