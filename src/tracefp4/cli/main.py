"""The shell around the commands.

``tracefp4 --help`` must answer at once, but most commands need torch and transformers, which take seconds to import. So
the table below names each command with its one-line summary; the module behind it is imported only when that command is
called or asked for its own help.

What a user gets wrong ends as one sentence on standard error and exit code 2, or, with ``--json``, as one JSON object
on standard output. Anything else that goes wrong is a fault of ours and shows its traceback.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from tracefp4 import __version__
from tracefp4.errors import ConfigError, TraceError, suggest

USAGE_EXIT = 2
"""Exit code of everything that the user can repair."""
INTERRUPT_EXIT = 130
"""Exit code after Ctrl-C, as shells expect it."""

# Usage errors of the parser; their class is public only as an ancestor of typer.BadParameter.
_ParserError = cast("type[Exception]", typer.BadParameter.__mro__[2])


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command lives. ``attribute`` is a function with annotated parameters, or a ``typer.Typer`` of several."""

    module: str
    summary: str
    attribute: str = "run"


COMMANDS: dict[str, Entry] = {
    "train": Entry("tracefp4.cli.train", "Train a policy by RL with FP4 rollouts."),
    "compare": Entry("tracefp4.cli.compare", "Compare methods by seeds: tables and figures of the paper."),
    "measure": Entry("tracefp4.cli.measure", "Measure how far apart rollout and trainer are."),
    "rollout": Entry("tracefp4.cli.rollout", "Generate in FP4 and record guidance."),
    "eval": Entry("tracefp4.cli.eval", "Estimate pass@k of a policy as it is deployed."),
    "quantize": Entry("tracefp4.cli.quantize", "Quantize the weights of a finished policy."),
    "report": Entry("tracefp4.cli.report", "Write the page of one run, or of several side by side."),
    "bench": Entry("tracefp4.cli.bench", "Time kernels and engine against the bound from bytes."),
    "doctor": Entry("tracefp4.cli.doctor", "Check this machine and what it can run."),
}
"""Every command, in the order in which ``--help`` lists them."""


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and imports them when they are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of :data:`COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that carries name and summary only: enough for the list of commands."""
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else TyperCommand(name=cmd_name, callback=None, help=entry.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command behind the first word; :class:`ConfigError` with the nearest name if there is none."""
        name, *rest = args
        if name.startswith("-"):
            return super().resolve_command(ctx, args)
        if name not in COMMANDS:
            raise ConfigError(f"unknown command {name!r}{suggest(name, COMMANDS)}")
        return name, load_command(name), rest


def load_command(name: str) -> Any:
    """Import the command ``name`` and turn it into something that parses arguments."""
    entry = COMMANDS[name]
    target = getattr(importlib.import_module(entry.module), entry.attribute)
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(add_completion=False, rich_markup_mode=None)
        target.command(name=name)(function)
    command = typer.main.get_command(target)
    command.name = name
    return command


app = typer.Typer(cls=LazyGroup, add_completion=False, rich_markup_mode=None)


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Reinforcement learning with FP4 rollouts and a trainer that rounds the way the rollout did."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: the words after ``tracefp4``.

    Returns:
        0 on success, 2 for anything the user can repair, 130 after Ctrl-C, else what the command chose.
    """
    if list(arguments) == ["--version"]:
        print(f"tracefp4 {__version__}")
        return 0
    words = list(arguments) or ["--help"]
    try:
        result = typer.main.get_command(app).main(words, prog_name="tracefp4", standalone_mode=False)
    except TraceError as error:
        return _fail(arguments, str(error), type(error).__name__)
    except _ParserError as error:
        return _usage(arguments, error)
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPT_EXIT
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the ``tracefp4`` script."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has gone. Point stdout elsewhere, or the interpreter complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _usage(arguments: Sequence[str], error: Any) -> int:
    context = getattr(error, "ctx", None)
    if context is not None and hasattr(error, "possibilities"):  # only an unknown option has this attribute
        option = error.option_name
        valid = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        message = f"unknown option {option!r}{suggest(option, [*valid, '--help'])}"
    else:
        message = error.format_message().rstrip(".")
        message = message[:1].lower() + message[1:]
    hint = "" if context is None else f"; see '{context.command_path} --help'"
    return _fail(arguments, message + hint, "UsageError")


def _fail(arguments: Sequence[str], message: str, kind: str) -> int:
    if "--json" in arguments:
        print(json.dumps({"error": message, "type": kind}))
    else:
        print(f"error: {message}", file=sys.stderr)
    return USAGE_EXIT


if __name__ == "__main__":
    main()
