"""Runs of a comparison, each a process of its own.

A run that crashes, is killed or runs out of memory takes nothing else with it: its folder keeps a ``job.json`` that
says how it ended, the others go on, and the next call of the same command tries again what did not finish. What is
finished is never repeated. Commands are those that a user would type, so any run can be repeated by hand.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def run_jobs(jobs: Sequence[Job], note: Callable[[str], None], side_by_side: int, devices: Sequence[str]) -> list[Job]:
    """Run what is not done yet; returns the jobs that failed.

    Args:
        jobs: in the order in which they start.
        note: told what begins and ends.
        side_by_side: runs at a time.
        devices: values of ``CUDA_VISIBLE_DEVICES`` that runs are dealt out to; empty to leave it alone.
    """
    slots: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for slot in range(side_by_side):
        slots.put(devices[slot % len(devices)] if devices else None)

    def run(job: Job) -> bool:
        slot = slots.get()
        try:
            return run_job(job, note, slot)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(side_by_side) as pool:
        try:
            done = list(pool.map(run, jobs))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [job for job, ok in zip(jobs, done, strict=True) if not ok]


def run_job(job: Job, note: Callable[[str], None], device: str | None = None) -> bool:
    """Run what is not done yet, on a device of its own if one is named; returns whether everything is done now."""
    job.folder.mkdir(parents=True, exist_ok=True)
    state = job.state()
    if state.get("status") != "done":
        note(f"{job.name}: training")
        start = time.monotonic()
        code, out = _run(job.words, job.folder / "log.txt", "tracefp4.cli.main", ["--json"], device)
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
            ok = _follow(step, job, note, device) and ok
    if ok and not job.keep_weights:
        shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
    return ok


def _follow(step: Step, job: Job, note: Callable[[str], None], device: str | None) -> bool:
    step.produces.parent.mkdir(parents=True, exist_ok=True)
    log = job.folder / f"log-{step.produces.stem}.txt"
    code, out = _run(step.words, log, step.module, ["--json"] if step.capture else [], device)
    if code == 0 and step.capture:
        step.produces.write_text(out, encoding="utf-8")
    if code != 0 or not step.produces.is_file():
        note(f"{job.name}: {step.name} failed: {_last_line(log) or out.strip()[-_TAIL:]}")
        return False
    return True


def _run(words: list[str], log: Path, module: str, more: list[str], device: str | None) -> tuple[int, str]:
    """Exit code and standard output; standard error goes to the log."""
    environment = os.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    with log.open("a", encoding="utf-8") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words, *more],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=environment,
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
