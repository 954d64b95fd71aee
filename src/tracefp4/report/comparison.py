"""Everything that a comparison shows, written into one folder.

    results.json            what all else is drawn from
    index.html              one page: verdict, tables, figures, commands
    tables.md, t1.csv ...   the tables as Markdown and CSV
    fig1.png ...            the figures

The verdict says first whether the experiment can tell methods apart at all: the reference has to have learned, and
plain quantization-aware training has to differ from it. Where one of the two fails, or was not run, it is called
inconclusive, and nothing is said of how methods rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tracefp4.errors import ConfigError
from tracefp4.report import figures, html
from tracefp4.report.arms import REFERENCE, TABLE_TITLES
from tracefp4.report.paper_figures import Drawing, draw_all
from tracefp4.report.results import Results, RunResult, save
from tracefp4.report.run_report import write_text
from tracefp4.report.tables import WINDOW, Row, arm_row, build, learned, markdown, to_csv, used

HALF_WIDTH = 3.0
"""Points: intervals of differences that are wider cannot rank methods."""
TAIL_RATIO = 1.5
"""The tail of the log-prob differences may exceed that of the reference by this factor."""


def write_comparison(results: Results, out: Path, against: str = "") -> dict[str, Path]:
    """Write tables, figures and page.

    Args:
        results: of the comparison.
        out: folder; files of an earlier call are replaced.
        against: name of an arm whose differences the tables show besides those to the reference.

    Returns:
        Paths by name: ``results``, ``page``, ``tables``, and each figure.

    Raises:
        ConfigError: runs that must not be paired, no arm called ``against``, matplotlib is missing, or the folder
            cannot be written.
    """
    tables = {name: build(results, name, against) for name in results.tables}
    drawings, notes = draw_all(results)
    notes += gaps(results)
    save(results, out / "results.json")
    said = verdict(results)
    lines = ["# Comparison", "", *(f"- {text}" for text in said), ""]
    for name, rows in tables.items():
        lines += [markdown(results, name, rows, against)]
        write_text(out / f"{name}.csv", to_csv(rows))
    if notes:
        lines += ["## Notes", "", *(f"- {text}" for text in notes), ""]
    write_text(out / "tables.md", "\n".join([*lines, "## Runs", "", *_command_lines(results)]) + "\n")
    paths = {"results": out / "results.json", "page": out / "index.html", "tables": out / "tables.md"}
    for drawing in drawings:
        paths[drawing.name] = out / f"{drawing.name}.png"
        _write_png(drawing, paths[drawing.name])
    write_text(paths["page"], render(results, tables, drawings, notes, said, against))
    return paths


def render(
    results: Results,
    tables: dict[str, list[Row]],
    drawings: Sequence[Drawing],
    notes: Sequence[str],
    said: list[str],
    against: str = "",
) -> str:
    """The page as text."""
    plots = [(d.title, figures.to_svg(d.figure, f"comparison-{d.name}")) for d in drawings]
    sections = [html.verdict(said)]
    for name, rows in tables.items():
        head, body = used(rows, against)
        sections.append(html.section(TABLE_TITLES[name], html.table(head, body, numbers=range(2, len(head)))))
    sections += [
        html.section("Figures", *(html.plots([plot]) for plot in plots)),
        html.section("Runs", html.folded("Command, result and time of every run", _commands(results))),
        html.section("Notes", html.notes(list(notes))),
    ]
    total = sum(len(results.done(arm.name)) for arm in results.arms)
    about = f"{total} finished runs of {len(results.arms)} arms; score: held-out items of {results.task}, points of 100"
    return html.page(f"Comparison on {results.task}", about, sections)


def verdict(results: Results) -> list[str]:
    """What the comparison showed, the conditions of its validity first."""
    said: list[str] = []
    if REFERENCE not in results.runs or not results.done(REFERENCE):
        return [f"No finished run of {REFERENCE}: differences to it are not known."]
    gains = [learned(run.first, run.last) for run in results.done(REFERENCE) if run.first and run.last]
    gained = all(gain.low is not None and gain.low > 0 for gain in gains) and bool(gains)
    text = ", ".join(f"{gain.estimate:+.1f}" for gain in gains)
    said.append(f"{REFERENCE} {'learned' if gained else 'did not clearly learn'}: {text} points by seed.")
    rows = {name.partition("@")[0]: arm_row(results, results.arm(name)) for name in reversed(_judged(results))}
    qat = rows.get("qat")
    if qat is None or qat.difference is None:
        ranks = False
        said.append(
            f"Inconclusive as to ranking: no finished run of qat stands beside one of {REFERENCE}, so nothing shows "
            "that FP4 costs anything here."
        )
    else:
        differs = _excludes_zero(qat.difference_interval)
        ranks = gained and differs
        said.append(f"qat {'differs' if differs else 'does not clearly differ'} from {REFERENCE}: {_difference(qat)}.")
        if not ranks:
            said.append("Inconclusive: change the task or the length before ranking methods.")
    trace = rows.get("trace")
    if trace is not None and trace.difference is not None:
        said += _of_trace(trace, arm_row(results, results.arm(REFERENCE)), ranks)
    saved = [run.series["guidance/saved_share"].mean() for run in _guided(results)]
    if saved:
        share = figures.share_text(sum(saved) / len(saved))
        said.append(f"{share} of the guidance bytes never left the engine: their samples trained nothing.")
    wide = [f"{name} ({_half(row):.1f})" for name, row in rows.items() if (_half(row) or 0.0) > HALF_WIDTH]
    if wide:
        said.append(f"Intervals wider than +-{HALF_WIDTH:g} points, too wide to rank: {', '.join(wide)}.")
    return said


def _judged(results: Results) -> list[str]:
    """Arms that the verdict speaks of: those of the leading table, or of the first that holds qat if it does not."""
    tables = [results.members[name] for name in (results.leading, *results.tables)]
    held = (members for members in tables if any(arm.partition("@")[0] == "qat" for arm in members))
    return next(held, tables[0])


def _of_trace(trace: Row, reference: Row, ranks: bool) -> list[str]:
    """What is said of trace; that it holds up against the reference only where the comparison ``ranks`` methods."""
    high = trace.difference_interval[1]
    if ranks:
        word = "is below" if high is not None and high < 0 else "is not below"
        said = [f"trace {word} {REFERENCE} by more than its interval: {_difference(trace)}."]
    else:
        said = [f"trace beside {REFERENCE}, which ranks nothing here: {_difference(trace)}."]
    if trace.tail is not None and reference.tail:
        ratio = trace.tail / reference.tail
        said.append(
            f"p99.9 of the log-prob difference of trace, worst {WINDOW} steps: {ratio:.2f} times that of "
            f"{REFERENCE} ({'within' if ratio <= TAIL_RATIO else 'beyond'} {TAIL_RATIO})."
        )
    return said


def _guided(results: Results) -> list[RunResult]:
    """Finished runs that recorded guidance."""
    runs = [run for arm in results.arms for run in results.done(arm.name)]
    return [run for run in runs if "guidance/saved_share" in run.series]


def gaps(results: Results) -> list[str]:
    """Runs that are missing or failed, and arms of one seed."""
    notes = []
    for name, runs in results.runs.items():
        missing = [str(run.seed) for run in runs if run.status == "missing"]
        if missing:
            notes.append(f"{name}: not run yet with seed {', '.join(missing)}.")
        notes += [f"{name}, seed {run.seed}: failed. {run.note}" for run in runs if run.status == "failed"]
        if len(results.done(name)) == 1:
            notes.append(f"{name}: one seed; its interval does not know how another run would have ended.")
    return notes


def _commands(results: Results) -> str:
    rows = [
        [name, str(run.seed), run.status, f"{run.seconds / 60:.1f}", run.warm_start, run.command]
        for name, runs in results.runs.items()
        for run in runs
        if run.status != "missing"
    ]
    return html.table(["arm", "seed", "status", "minutes", "warm start", "command"], rows)


def _command_lines(results: Results) -> list[str]:
    lines = []
    for name, runs in results.runs.items():
        lines += [f"- {name}, seed {run.seed} ({run.status}): `{run.command}`" for run in runs if run.command]
    return lines


def _write_png(drawing: Drawing, path: Path) -> None:
    try:
        path.write_bytes(figures.to_png(drawing.figure))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from error


def _excludes_zero(interval: tuple[float | None, float | None]) -> bool:
    low, high = interval
    return low is not None and high is not None and (low > 0 or high < 0)


def _difference(row: Row) -> str:
    low, high = row.difference_interval
    where = "" if low is None or high is None else f", 95 % interval {low:+.1f} to {high:+.1f}"
    return f"{row.difference:+.1f} points{where}, {row.difference_seeds} seed{'s' if row.difference_seeds > 1 else ''}"


def _half(row: Row) -> float | None:
    low, high = row.difference_interval
    return None if low is None or high is None else (high - low) / 2
