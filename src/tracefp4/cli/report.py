"""``tracefp4 report``: the page of one run, or of several side by side; the figures of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.console import JsonOption, emit
from tracefp4.errors import ConfigError
from tracefp4.report.compare import compare_runs
from tracefp4.report.run_report import write_report
from tracefp4.report.throughput import draw_benchmark


def run(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders: one gives its page, several a comparison. Or a file of bench decode --output.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: RUN/report.html, or comparison.html for several.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Label of a run, once for each; equal labels are seeds of one arm.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder for the plots as PNG files, besides the page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the page of one run, or of several side by side.

    Reads config.toml, metrics.jsonl and, where present, samples.jsonl and summary.json of each run folder. The page
    needs no network and no other file. Of a benchmark's file it draws throughput by precision (figure 14 of the paper).
    """
    if len(runs) == 1 and runs[0].is_file():
        if label or out is not None:
            raise ConfigError("the figures of a benchmark have names of their own; --images says in which folder")
        files = [str(file) for file in draw_benchmark(runs[0], images)]
        emit({"figures": files, "runs": [str(runs[0])]}, as_json=as_json, text=f"wrote {', '.join(files)}")
        return
    if len(runs) == 1:
        if label:
            raise ConfigError("--label is for comparisons; give several run folders")
        page = write_report(runs[0], out, images)
    else:
        page = compare_runs(runs, out or Path("comparison.html"), label or None, images)
    emit({"report": str(page), "runs": [str(folder) for folder in runs]}, as_json=as_json, text=f"wrote {page}")
