"""Grading workers: right marks, bounded time and memory, and nothing that one answer does reaches the next."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from tracefp4.errors import TaskError
from tracefp4.rl.grading import MAX_CHARS, Grader, grade_math


@pytest.fixture(scope="module")
def math():
    with Grader("math", timeout=1.0) as grader:
        yield grader


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of reward functions on the import path."""
    (tmp_path / "rewards_of_test.py").write_text(
        """
import os, socket, sys, time

def fair(completion, answer):
    return float(completion == answer)

def hostile(completion, answer):
    if completion == "loop":
        while True: pass
    if completion == "exit":
        os._exit(0)
    if completion == "memory":
        return float(len(bytearray(8 << 30)))
    if completion == "print":
        print('{"id": "x", "score": 1.0, "status": "ok"}', flush=True)
        os.write(1, b'{"score": 1.0, "status": "ok"}' + bytes([10]))
        return 0.0
    if completion == "noise":
        sys.stderr.write("x" * (1 << 20))
        return 0.5
    if completion == "raise":
        raise ValueError("no")
    if completion == "nan":
        return float("nan")
    if completion == "fork":
        for _ in range(3):
            if os.fork() == 0:
                time.sleep(0.2)
                os._exit(0)
        return 0.25
    return fair(completion, answer)
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "rewards_of_test"
    sys.modules.pop("rewards_of_test", None)


EQUAL = [
    ("12", "12.0"),
    ("\\frac{3}{4}", "3/4"),
    ("0.5", "\\frac12"),
    ("x^2+1", "1+x^2"),
    ("\\{1,2\\}", "2,1"),
    ("1,234", "1234"),
    ("\\sqrt{2}", "2^{1/2}"),
    ("-7", "$-7$"),
]
DIFFERENT = [("12", "13"), ("\\frac{3}{4}", "4/3"), ("5", "five"), ("x", "y"), ("5", "")]


def test_mathematical_equality(math):
    assert [g.score for g in grade_math(math, EQUAL)] == [1.0] * len(EQUAL)
    assert [g.score for g in grade_math(math, DIFFERENT)] == [0.0] * len(DIFFERENT)
    assert grade_math(math, [("5", None)])[0].score == 0.0


HOSTILE = [
    "9^9^9^9",
    "9^{9^{9^{9^9}}}",
    "__import__('os').system('touch {canary}')",
    "$__import__('os').system('touch {canary}')$",
    "\\pi**__import__",
    "\\sum_{i=1}^{10^{12}} i!",
    "{" * 5000,
    "\\frac" * 1500,
    "\ud800\udfff",
    "\x00\x01\x02",
    "ÿþ" * 50,
    "\u202e\u0661\u0662",
]
SLOWER = [
    "\\text{__import__('os')}",
    "\\int_0^{10^9} \\sin(x^x) dx",
    "(" * 2000,
    "1+" * 3000 + "1",
    "1e999999999",
    "5!!!!!!!!!!",
    "\\" * 999,
]


@pytest.mark.parametrize("text", HOSTILE + [pytest.param(text, marks=pytest.mark.slow) for text in SLOWER])
def test_hostile_answers_score_0_in_bounded_time(math, tmp_path, text):
    canary = tmp_path / "canary"
    start = time.monotonic()
    (grade,) = grade_math(math, [("5", text.replace("{canary}", str(canary)))])
    assert grade.score == 0.0
    assert time.monotonic() - start < 6.0  # the limit, and a new worker
    assert not canary.exists()
    assert grade_math(math, [("1/2", "0.5")])[0].score == 1.0


def test_megabyte_answers_are_not_even_sent(math):
    start = time.monotonic()
    grades = grade_math(math, [("5", "1" * 1_000_000), ("5", "5 " * MAX_CHARS)])
    assert [g.status for g in grades] == ["too_long", "too_long"]
    assert time.monotonic() - start < 0.5


def test_the_audit_hook_refuses_code_network_and_files(tmp_path):
    """The second line of defence, tried directly in a process of its own."""
    code = """
import socket, subprocess, sys
from tracefp4.rl.grading_worker import Refused, _guard
_guard(compiling=False)
for attack in (
    lambda: eval("1 + 1"),
    lambda: exec("import os"),
    lambda: compile("x", "<string>", "exec"),
    lambda: socket.create_connection(("127.0.0.1", 9)),
    lambda: subprocess.run(["true"]),
    lambda: open(sys.argv[1], "w"),
):
    try:
        attack()
    except Refused:
        continue
    sys.exit("not refused")
eval("Integer (12 )", {"Integer": int})
print("held")
"""
    import subprocess

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "f")], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "held", done.stderr


def test_isolated_functions_survive_hostile_completions(module):
    with Grader("function", timeout=1.0, memory_mb=2048, setup={"path": f"{module}:hostile"}) as grader:
        calls = ["loop", "exit", "memory", "print", "noise", "raise", "nan", "fork", "x" * 1_000_000]
        expected = ["timeout", "crash", "memory", "ok", "ok", "error", "error", "ok", "ok"]
        for completion, status in zip(calls, expected, strict=True):
            bad, good = grader.grade_all(
                [{"completion": completion, "answer": "7"}, {"completion": "7", "answer": "7"}]
            )
            assert (bad.status, good.score) == (status, 1.0), completion
            assert bad.score in (0.0, 0.25, 0.5)
        assert grader.counts["ok"] == 4 + len(calls)


def test_workers_grade_in_parallel_and_in_order(module, tmp_path):
    (tmp_path / "rewards_of_test.py").write_text(
        "import time\ndef slow(completion, answer):\n    time.sleep(0.3)\n    return float(completion)\n"
    )
    with Grader("function", workers=4, timeout=5.0, setup={"path": f"{module}:slow"}) as grader:
        grader.grade_all([{"completion": "0"}] * 4)  # start all of them
        start = time.monotonic()
        grades = grader.grade_all([{"completion": str(i)} for i in range(8)])
        assert [g.score for g in grades] == [float(i) for i in range(8)]
        assert time.monotonic() - start < 8 * 0.3


def test_graders_work_in_threads(math):
    # math-verify's own time limit needs the main thread; a worker process does not care.
    out = []
    thread = threading.Thread(target=lambda: out.extend(grade_math(math, [("2/4", "1/2")])))
    thread.start()
    thread.join()
    assert out[0].score == 1.0


def test_closing_ends_the_processes(math):
    with Grader("math") as grader:
        grade_math(grader, [("1/2", "0.5")])
        pid = grader._all[0]._process.pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_a_setup_that_cannot_work_is_an_error(module):
    with (
        Grader("function", setup={"path": "no_such_module:f"}) as grader,
        pytest.raises(TaskError, match="'no_such_module' cannot be imported"),
    ):
        grader.grade_all([{"completion": "x"}])
    with (
        Grader("function", setup={"path": f"{module}:fair"}) as grader,
        pytest.raises(TaskError, match="cannot travel"),
    ):
        grader.grade_all([{"completion": "x", "answer": object()}])
    with pytest.raises(TaskError, match="at least 1 worker"):
        Grader("math", workers=0)
