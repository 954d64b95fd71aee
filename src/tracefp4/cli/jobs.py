"""Runs of a comparison, each a process of its own.

A run that crashes, is killed or runs out of memory takes nothing else with it: its folder keeps a ``job.json`` that
says how it ended, the others go on, and the next call of the same command tries again what did not finish. What is
finished is never repeated. Commands are those that a user would type, so any run can be repeated by hand.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TAIL = 400
"""Characters of a failure's last line that are kept."""


@dataclass(slots=True)
class Step:
    """A command after the training of a run; done when ``produces`` exists."""

    words: list[str]
    """After ``tracefp4``; or a module to run, if ``module`` is set."""
    produces: Path
    module: str = "tracefp4.cli.main"
    capture: bool = False
    """Write the command's standard output to ``produces``."""
    title: str = ""
    """How messages call it; the command's name by default."""

    @property
    def name(self) -> str:
        """How messages call it."""
        return self.title or self.words[0]


@dataclass(slots=True)
class Job:
    """One seed of one arm."""

    arm: str
    seed: int
    folder: Path
    words: list[str]
    """The training command, after ``tracefp4``."""
    after: Callable[[], list[Step]] = field(default=lambda: [])
    """What follows it; asked when training is done, because it may read what that left."""
    keep_weights: bool = False

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.arm}, seed {self.seed}"

    @property
    def command(self) -> str:
        """The training command as a user would type it."""
        return shlex.join(["tracefp4", *self.words])

    def state(self) -> dict[str, Any]:
        """What ``job.json`` says; empty before the first attempt."""
        try:
            return json.loads((self.folder / "job.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


def run_job(job: Job, note: Callable[[str], None]) -> bool:
    """Run what is not done yet; returns whether everything is done now."""
    job.folder.mkdir(parents=True, exist_ok=True)
    state = job.state()
    if state.get("status") != "done":
        note(f"{job.name}: training")
        start = time.monotonic()
        code, out = _run(job.words, job.folder / "log.txt", "tracefp4.cli.main", ["--json"])
        fault = _fault(code, out, job.folder / "log.txt")
        seconds = round(time.monotonic() - start, 1)
        state = {"arm": job.arm, "seed": job.seed, "command": job.command, "seconds": seconds, "exit_code": code}
        _write(job.folder / "job.json", state | ({"status": "failed", "note": fault} if fault else {"status": "done"}))
        if fault:
            note(f"{job.name}: failed after {seconds:.0f} s: {fault}")
            return False
        note(f"{job.name}: done in {seconds:.0f} s")
    ok = True
    for step in job.after():
        if not step.produces.is_file():
            note(f"{job.name}: {step.name}")
            ok = _follow(step, job, note) and ok
    if ok and not job.keep_weights:
        shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
    return ok


def _follow(step: Step, job: Job, note: Callable[[str], None]) -> bool:
    step.produces.parent.mkdir(parents=True, exist_ok=True)
    log = job.folder / f"log-{step.produces.stem}.txt"
    code, out = _run(step.words, log, step.module, ["--json"] if step.capture else [])
    if code == 0 and step.capture:
        step.produces.write_text(out, encoding="utf-8")
    if code != 0 or not step.produces.is_file():
        note(f"{job.name}: {step.name} failed: {_last_line(log) or out.strip()[-_TAIL:]}")
        return False
    return True


def _run(words: list[str], log: Path, module: str, more: list[str]) -> tuple[int, str]:
    """Exit code and standard output; standard error goes to the log."""
    with log.open("a", encoding="utf-8") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words, *more], stdout=subprocess.PIPE, stderr=stream, text=True
        )
        try:
            out = process.communicate()[0]
        except KeyboardInterrupt:
            # The child got the signal too and ends its step first.
            process.wait()
            raise
    return process.returncode, out


def _fault(code: int, out: str, log: Path) -> str:
    """Why a training command did not finish, or an empty text."""
    last = out.strip().splitlines()[-1:] or [""]
    try:
        found = json.loads(last[0])
    except ValueError:
        found = {}
    if code != 0:
        return str(found.get("error") or _last_line(log) or f"exit code {code}")[-_TAIL:]
    return "interrupted" if found.get("interrupted") else ""


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[-_TAIL:] if lines else ""


def _write(path: Path, data: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
