"""The shell: help without heavy imports, one-sentence errors, exit codes, JSON for machines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracefp4
from tracefp4 import __version__
from tracefp4.cli import main
from tracefp4.errors import ConfigError


@pytest.fixture
def registered(monkeypatch):
    """Register a function as the command ``probe``."""

    def register(function):
        monkeypatch.setitem(main.COMMANDS, "probe", main.Entry("tests_probe", "A probe.", "run"))
        module = type(sys)("tests_probe")
        module.run = function
        monkeypatch.setitem(sys.modules, "tests_probe", module)

    return register


def test_version(capsys):
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"tracefp4 {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(arguments, capsys):
    assert main.run(arguments) == 0
    shown = capsys.readouterr().out
    for name, entry in main.COMMANDS.items():
        assert name in shown
        assert entry.summary in shown


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_registered_command_has_help_and_json(name, capsys):
    assert main.run([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Usage: tracefp4 " + name in shown
    assert "--json" in shown or "COMMAND" in shown


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from tracefp4.cli import main; main.run(['--help']);"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numpy', 'pydantic'} & set(sys.modules);"
        "sys.exit(' '.join(heavy) or 0)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(tracefp4.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


def test_unknown_command_names_the_nearest(capsys):
    assert main.run(["docter"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'docter' (did you mean 'doctor'?)\n"


def test_unknown_option_names_the_nearest(capsys):
    assert main.run(["report", "--imagse", "x"]) == 2
    assert "unknown option '--imagse' (did you mean '--images'?)" in capsys.readouterr().err


def test_missing_argument_is_a_sentence(capsys):
    assert main.run(["report"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: missing argument")
    assert error.count("\n") == 1


def test_typed_errors_are_one_sentence_or_one_object(registered, capsys):
    def fail(as_json: bool = False) -> None:
        raise ConfigError("steps = -1 is not possible")

    registered(fail)
    assert main.run(["probe"]) == 2
    assert capsys.readouterr().err == "error: steps = -1 is not possible\n"
    assert main.run(["report", "/nowhere", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["type"] == "ConfigError"
    assert "/nowhere" in found["error"]


def test_other_errors_are_not_hidden(registered):
    def fail() -> None:
        raise ZeroDivisionError

    registered(fail)
    with pytest.raises(ZeroDivisionError):
        main.run(["probe"])


def test_interrupt_and_exit_codes(registered, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    registered(interrupted)
    assert main.run(["probe"]) == 130
    registered(lambda: None)
    assert main.run(["probe"]) == 0
    capsys.readouterr()
