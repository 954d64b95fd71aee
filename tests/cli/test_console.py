"""What is printed: a table on a terminal, plain lines elsewhere."""

import io
import json

import pytest
from rich.console import Console

from tracefp4.cli.console import LiveMetrics, duration, emit, number, progress


def make_console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False, color_system=None)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.7312, "0.731"), (8.1e-4, "8.1e-04"), (12345.6, "12346"), (31.24, "31.2"), (1.0, "1"), (None, "-")],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.84, "0.8 s"), (245, "4 min 05 s"), (7800, "2 h 10 min")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_plain_lines_without_a_terminal():
    console = make_console(terminal=False)
    with LiveMetrics(3, console=console) as live:
        live.update(0, {"reward/mean": 0.25, "mismatch_kl/mean": 8e-4, "something/else": 1.0})
        live.note("evaluation: [0.2, 0.3]")
        live.update(1, {"reward/mean": None, "entropy": 1.5})
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("step 0 (1/3)  reward 0.250  mismatch 8.0e-04")
    assert "else" not in lines[0]
    assert lines[1] == "evaluation: [0.2, 0.3]"
    assert lines[2].startswith("step 1 (2/3)  entropy 1.500")
    assert len(lines) == 3


def test_table_on_a_terminal():
    console = make_console(terminal=True)
    with LiveMetrics(3, console=console) as live:
        live.update(0, {"reward/mean": 0.25})
        live.note("a remark")
        live.update(1, {"reward/mean": 0.5})
    shown = console.file.getvalue()
    for text in ("reward", "0.250", "0.500", "2/3", "a remark"):
        assert text in shown
    assert "coverage" not in shown


def test_resumed_run_counts_what_was_done_before():
    console = make_console(terminal=False)
    with LiveMetrics(10, console=console, start=6) as live:
        live.update(6, {"reward/mean": 0.5})
    assert "step 6 (7/10)" in console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(terminal):
    console = make_console(terminal)
    with progress("warm start", 40, console) as counter:
        for _ in range(40):
            counter.advance()
    shown = console.file.getvalue()
    assert "40/40" in shown
    if not terminal:
        assert len(shown.splitlines()) == 10


def test_progress_of_nothing():
    with progress("warm start", 0, make_console(terminal=False)) as counter:
        counter.advance()


def test_emit(capsys):
    emit({"a": 1}, as_json=True, text="one")
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    emit({"a": 1}, as_json=False, text="one")
    assert capsys.readouterr().out == "one\n"
