"""``tracefp4 train``: the reinforcement-learning loop, from one config file to a report."""

from __future__ import annotations

import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tracefp4.cli.console import JsonOption, LiveMetrics, emit, progress, stderr_console


def run(
    config: Annotated[Path, typer.Argument(help="TOML file; every key is described in docs/configuration.md.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, as a.b=value; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a policy by RL with FP4 rollouts; resumes from the newest checkpoint of its output folder.

    Writes config.toml, metrics.jsonl, samples.jsonl, checkpoints/ and report.html to the output folder. Ctrl-C finishes
    the current step, writes a checkpoint and stops; a second one stops at once.
    """
    from tracefp4 import config as settings

    tree = settings.load(config, set_ or [])
    if dry_run:
        emit(tree.model_dump(mode="json"), as_json=as_json, text=settings.to_toml(tree))
        return
    from tracefp4.report.run_report import write_report
    from tracefp4.rl.run import Run

    console = stderr_console()
    with progress("warm start", tree.warm_start.steps) as warm:
        trainer = Run(tree, note=console.print, warm_progress=lambda step, loss: warm.advance())
    trainer.describe(console.print)
    with LiveMetrics(tree.steps, start=trainer.step) as live, _stop_on_interrupt() as stop:
        trainer.note = live.note
        trainer.train(live.update, lambda: stop.asked)
    report = write_report(Path(tree.output_dir))
    done = {"steps": trainer.step, "interrupted": stop.asked, "output_dir": tree.output_dir, "report": str(report)}
    emit(
        done,
        as_json=as_json,
        text=f"{'stopped' if stop.asked else 'finished'} at step {trainer.step}; report: {report}",
    )


@contextmanager
def _stop_on_interrupt() -> Iterator[types.SimpleNamespace]:
    """Turn the first SIGINT or SIGTERM into a request to stop; the second one acts as usual."""
    state = types.SimpleNamespace(asked=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: types.FrameType | None) -> None:
        state.asked = True
        stderr_console().print("stopping after this step; once more to stop at once")
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
