"""The page of one run.

Read from top to bottom it answers: what came of it (sentences, headline numbers), how it went (plots), what the policy
says (samples), and how to repeat it (configuration, environment). What the run did not record is named at the end
instead of being shown as an empty plot.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.report import figures, html
from tracefp4.report.headline import head_cards, headline, verdict
from tracefp4.report.panels import PANELS, mismatch, missing_metrics, reward
from tracefp4.report.run_data import Run, read_run, read_summary


def write_report(folder: str | Path, out: str | Path | None = None, images: str | Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        folder: the run folder with ``config.toml`` and ``metrics.jsonl`` (and ``samples.jsonl``, ``summary.json``).
        out: file to write; by default ``report.html`` in the run folder.
        images: folder for the plots as PNG files, besides the page: ``overview.png`` and one for each panel.

    Returns:
        The path of the page.

    Raises:
        ConfigError: the run cannot be read, matplotlib is missing, or the page cannot be written.
    """
    run = read_run(folder)
    target = Path(out) if out is not None else Path(folder) / "report.html"
    write_text(target, render(run))
    if images is not None:
        write_images(run, Path(images))
    return target


def render(run: Run) -> str:
    """The page as text."""
    head = headline(run)
    panels = [panel for build in PANELS if (panel := build(run)) is not None]
    plots = [(p.title, figures.to_svg(figures.draw([p]), f"{run.name}-{p.name}")) for p in panels]
    task = run.setting("task.name") or run.setting("task.kind") or "unknown task"
    parts = [
        run.setting("policy"),
        run.setting("spec"),
        f"method {run.setting('method')}",
        f"plan {run.setting('plan')}",
    ]
    about = " · ".join(
        str(part) for part in [*parts, f"seed {run.setting('seed')}"] if part and "None" not in str(part)
    )
    sections = [
        html.verdict(verdict(run, head)),
        html.cards(head_cards(run, head)),
        html.plots(plots),
        html.section("Samples", *[_sample(row) for row in choose_samples(run.samples)]),
        html.section("Environment", html.pairs(run.summary.get("environment", {}))),
        html.section("How to repeat it", html.folded("Resolved configuration", html.pairs(flatten(run.config)))),
        html.section("Notes", html.notes(_notes(run))),
    ]
    return html.page(f"{task}: {run.name}", about, sections)


def write_images(run: Run, folder: Path) -> list[Path]:
    """Write ``overview.png`` (reward beside mismatch) and one PNG for each panel; returns the paths."""
    chosen = [panel for build in (reward, mismatch) if (panel := build(run)) is not None]
    pictures = [("overview", chosen)] if chosen else []
    pictures += [(panel.name, [panel]) for build in PANELS if (panel := build(run)) is not None]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, panels in pictures:
            (folder / f"{name}.png").write_bytes(figures.to_png(figures.draw(panels)))
    except OSError as error:
        raise ConfigError(f"images cannot be written to {str(folder)!r}: {error.strerror}") from error
    return [folder / f"{name}.png" for name, _ in pictures]


def write_text(target: Path, text: str) -> None:
    """Write a file whole or not at all: into one beside it, then renamed."""
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        raise ConfigError(f"{str(target)!r} cannot be written: {error.strerror}") from error


def update_summary(folder: str | Path, entries: dict[str, Any]) -> None:
    """Add entries to the run's ``summary.json``; the page shows ``environment`` and ``mismatch_kl_floor``.

    Args:
        folder: the run folder.
        entries: JSON values by name; a name that is there already is replaced.

    Raises:
        ConfigError: the file is there and is no JSON object, or cannot be written.
    """
    summary = read_summary(Path(folder)) | entries
    write_text(Path(folder) / "summary.json", json.dumps(summary, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def choose_samples(samples: Sequence[dict[str, Any]], each: int = 2) -> list[dict[str, Any]]:
    """A few samples that tell the story: worst and best of the first step, worst and best of the last one."""
    if not samples:
        return []
    chosen: list[dict[str, Any]] = []
    for step in sorted({samples[0]["step"], samples[-1]["step"]}):
        of_step = sorted((row for row in samples if row["step"] == step), key=lambda row: row.get("reward") or 0.0)
        ends = of_step if len(of_step) <= each else of_step[: each // 2] + of_step[-(each - each // 2) :]
        chosen += ends
    return chosen


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as dotted names, the way ``--set`` takes them."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _sample(row: dict[str, Any]) -> str:
    title = f"step {row['step']}"
    if row.get("reward") is not None:
        title += f" · reward {row['reward']:g}"
    if row.get("answer") is not None:
        title += f" · expected {row['answer']}"
    return html.sample(title, str(row.get("prompt", "")), str(row.get("response", "")))


def _notes(run: Run) -> list[str]:
    lines = list(run.notes)
    failures = run.series("guidance/scale_check_failures").values
    if any(failures):
        share = sum(failures) / len(failures)
        lines.append(f"{share:.2%} of the checks of restored block scales failed: some scales were not the rollout's.")
    missing = missing_metrics(run)
    if missing:
        lines.append("Not recorded in this run, and therefore not shown: " + ", ".join(missing) + ".")
    if not run.samples:
        lines.append("No samples were recorded.")
    if not run.summary.get("environment"):
        lines.append("No environment was recorded.")
    return lines
