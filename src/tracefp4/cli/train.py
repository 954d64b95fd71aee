"""``tracefp4 train``: the reinforcement-learning loop, from one config file to a report."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracefp4.cli.console import JsonOption, LiveMetrics, emit, progress, stderr_console
from tracefp4.errors import ConfigError

if TYPE_CHECKING:
    from tracefp4.config import Config
    from tracefp4.training.ranks import Ranks


def run(
    config: Annotated[Path, typer.Argument(help="TOML file; every key is described in docs/configuration.md.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, as a.b=value; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a policy by RL with FP4 rollouts; resumes from the newest checkpoint of its output folder.

    Writes config.toml, metrics.jsonl, samples.jsonl, summary.json, checkpoints/ and report.html to the output folder.
    Ctrl-C finishes the current step, writes a checkpoint and stops; a second one stops at once.
    On several GPUs: torchrun --nproc-per-node N -m tracefp4.cli.main train CONFIG.
    """
    from tracefp4 import config as settings

    tree = settings.load(config, set_ or [])
    if dry_run:
        from tracefp4.config_text import to_toml
        from tracefp4.rl.plans import resolved

        tree = resolved(tree)
        emit(tree.model_dump(mode="json"), as_json=as_json, text=to_toml(tree))
        return
    from tracefp4.training.ranks import joined

    with joined() as ranks:
        if ranks.first:
            _lead(tree, ranks, as_json)
        else:
            _follow(tree, ranks)


def _follow(tree: Config, ranks: Ranks) -> None:
    """A run on a rank that is not the first one: the same, without a word."""
    from tracefp4.rl.run import Run

    with closing(Run(tree, ranks=ranks)) as trainer, _stop_on_interrupt() as stop:
        trainer.describe(lambda text: None)
        trainer.train(lambda step, metrics: None, lambda: stop.asked)


def _lead(tree: Config, ranks: Ranks, as_json: bool) -> None:
    """A run that says what it does, and writes its report."""
    from tracefp4.cli.doctor import environment
    from tracefp4.report.run_report import update_summary
    from tracefp4.rl.run import Run

    console = stderr_console()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    with progress("warm start", tree.warm_start.steps) as warm:
        trainer = Run(tree, note=say, warm_progress=lambda step, loss: warm.advance(), ranks=ranks)
    with closing(trainer):
        trainer.describe(say)
        start = trainer.start
        facts = {"warm_start": start.name, "warm_start_seconds": round(start.seconds, 1)}
        update_summary(tree.output_dir, {"environment": environment(), "policy": trainer.source, **facts})
        with LiveMetrics(tree.steps, start=trainer.step) as live, _stop_on_interrupt() as stop:
            trainer.note = live.note
            trainer.train(live.update, lambda: stop.asked)
    report = _report(Path(tree.output_dir), say)
    done = {"steps": trainer.step, "interrupted": stop.asked, "output_dir": tree.output_dir, "report": report}
    verb = "stopped" if stop.asked else "finished"
    emit(done, as_json=as_json, text=f"{verb} at step {trainer.step}; report: {report or 'none'}")


def _report(folder: Path, say: Callable[[str], None]) -> str | None:
    """Write the page. The run is complete without it, so a machine that cannot draw is told and nothing more."""
    from tracefp4.report.run_report import write_report

    try:
        return str(write_report(folder))
    except ConfigError as error:
        say(f"no report: {error}")
        return None


@contextmanager
def _stop_on_interrupt() -> Iterator[types.SimpleNamespace]:
    """Turn the first SIGINT or SIGTERM into a request to stop; the second one acts as usual."""
    state = types.SimpleNamespace(asked=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: types.FrameType | None) -> None:
        state.asked = True
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"stopping after this step; once more to stop at once\n")
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
