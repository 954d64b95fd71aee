"""Grading in a process of its own.

A grader sees text that a model wrote while it was being rewarded for whatever makes the grader say 1. So answers are
judged in worker processes: one that hangs on ``9^9^9^9`` is killed, one that eats memory dies alone, and the next
answer gets a fresh one. Requests and replies are plain strings and numbers, one JSON object a line over pipes; no
object is ever unpickled on either side, and a reply counts only if it carries the random id of its request.

Three kinds of worker (:mod:`tracefp4.rl.grading_worker`): ``math`` compares two mathematical answers with math-verify,
``reasoning_gym`` runs those scorers that parse expressions, ``function`` runs a user's reward function. Model output
is never evaluated by the first two. A worker of kind ``function`` is the user's own code with a time and memory
limit; it is not a sandbox for running code that a model wrote.

Whatever goes wrong with an answer makes a :class:`Grade` of score 0 with a status that says why, and is counted. What
is wrong with the *setup* (a package that is missing, a function that cannot be imported) raises.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

from tracefp4.errors import TaskError

Kind = Literal["math", "reasoning_gym", "function"]
Status = Literal["ok", "timeout", "crash", "memory", "refused", "error", "too_long"]

MAX_CHARS = 10_000
"""Longer answers are not graded by the first two kinds: no right answer is that long."""

_STARTUP_SECONDS = 120.0
_MEMORY_MB = {"math": 1024, "reasoning_gym": 2048, "function": 16_384}
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHASHSEED")


@dataclass(frozen=True, slots=True)
class Grade:
    """The outcome of one request."""

    score: float
    status: Status = "ok"
    detail: str = ""


class Worker:
    """One worker process; starts with the first request and again after it was lost.

    Args:
        kind: what it grades.
        setup: further keys of the first line (``path`` of a reward function).
        memory_mb: address space limit; 0 is none.
    """

    def __init__(self, kind: Kind, setup: Mapping[str, Any], memory_mb: int) -> None:
        self._first = {"kind": kind, "memory_mb": memory_mb, **setup}
        self._trusted = kind == "function"
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def ask(self, payload: Mapping[str, Any], timeout: float) -> Grade:
        """Send one request and wait at most ``timeout`` seconds for its reply.

        Raises:
            TaskError: the worker cannot be set up; its own message says why.
        """
        if self._process is None:
            self._start()
        ident = secrets.token_hex(8)
        request = _line({"id": ident, "timeout": timeout, "payload": dict(payload)})
        try:
            reply = self._exchange(request, time.monotonic() + timeout)
        except TimeoutError:
            self.close()
            return Grade(0.0, "timeout", f"no answer within {timeout:g} s")
        except (EOFError, OSError):
            self.close()
            return Grade(0.0, "crash", "the worker ended")
        if reply.get("id") != ident:
            self.close()
            return Grade(0.0, "crash", "a reply to another request")
        if reply["status"] == "memory":
            self.close()
        if reply["status"] != "ok":
            return Grade(0.0, reply["status"], reply.get("detail", ""))
        return Grade(float(reply["score"]))

    def close(self) -> None:
        """Kill the process, if there is one, and wait for it."""
        if self._process is not None:
            self._process.kill()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process.wait()
        self._process, self._buffer = None, b""

    def _start(self) -> None:
        # -P keeps the current folder off the path unless the parent had it there: a file json.py must not be imported.
        environment = dict(os.environ) if self._trusted else {k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tracefp4.rl.grading_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C ends the run, and the run ends its workers.
        )
        for stream in (self._process.stdin, self._process.stdout):
            os.set_blocking(stream.fileno(), False)  # type: ignore[union-attr]
        try:
            reply = self._exchange(_line(self._first), time.monotonic() + _STARTUP_SECONDS)
        except (TimeoutError, EOFError, OSError) as error:
            self.close()
            raise TaskError(f"a grading worker of kind {self._first['kind']!r} did not start: {error}") from error
        if not reply.get("ready"):
            self.close()
            raise TaskError(f"a grading worker of kind {self._first['kind']!r} cannot start: {reply.get('error')}")

    def _exchange(self, message: bytes, deadline: float) -> dict[str, Any]:
        """Write one line and read one line, both bounded by the deadline."""
        if self._process is None or self._process.stdin is None or self._process.stdout is None:
            raise EOFError("the worker is not running")
        pending = memoryview(message)
        source, sink = self._process.stdout.fileno(), self._process.stdin.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            selector.register(sink, selectors.EVENT_WRITE)
            while b"\n" not in self._buffer:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events and time.monotonic() >= deadline:
                    raise TimeoutError("the deadline passed")
                for key, _ in events:
                    if key.fd == sink:
                        pending = pending[os.write(sink, pending[:65536]) :]
                        if not pending:
                            selector.unregister(sink)
                    else:
                        chunk = os.read(source, 65536)
                        if not chunk:
                            raise EOFError("the worker closed its output")
                        self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def _line(message: Mapping[str, Any]) -> bytes:
    """One JSON line; its ASCII escapes carry lone surrogates and every other odd character."""
    try:
        return json.dumps(message).encode("ascii") + b"\n"
    except (TypeError, ValueError) as error:
        raise TaskError(f"a value cannot travel to a grading worker as JSON: {error}") from error


class Grader:
    """A pool of workers of one kind.

    Args:
        kind: ``math``, ``reasoning_gym`` or ``function``.
        workers: processes; each takes one answer at a time.
        timeout: seconds an answer may take; then its worker is killed.
        memory_mb: address space of a worker; ``None`` for the default of the kind, 0 for no limit.
        setup: for ``function``: ``{"path": "package.module:function"}``.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        workers: int = 1,
        timeout: float = 5.0,
        memory_mb: int | None = None,
        setup: Mapping[str, Any] | None = None,
    ) -> None:
        if workers < 1 or timeout <= 0:
            raise TaskError(f"a grader needs at least 1 worker and a positive timeout, got {workers} and {timeout}")
        self.counts: Counter[str] = Counter()
        """Grades by status."""
        self._kind, self._timeout = kind, timeout
        memory = _MEMORY_MB[kind] if memory_mb is None else memory_mb
        self._all = [Worker(kind, setup or {}, memory) for _ in range(workers)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._all:
            self._idle.put(worker)

    def grade_all(self, payloads: Sequence[Mapping[str, Any]]) -> list[Grade]:
        """Grades of many requests, in order; as many at a time as there are workers.

        Raises:
            TaskError: a worker cannot be set up.
        """
        if len(payloads) == 1 or len(self._all) == 1:
            grades = [self._one(payload) for payload in payloads]
        else:
            with ThreadPoolExecutor(len(self._all)) as pool:
                grades = list(pool.map(self._one, payloads))
        self.counts.update(grade.status for grade in grades)
        return grades

    def close(self) -> None:
        """End all workers."""
        for worker in self._all:
            worker.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one(self, payload: Mapping[str, Any]) -> Grade:
        if self._kind != "function" and any(isinstance(v, str) and len(v) > MAX_CHARS for v in payload.values()):
            return Grade(0.0, "too_long", f"more than {MAX_CHARS} characters")
        worker = self._idle.get()
        try:
            return worker.ask(payload, self._timeout)
        finally:
            self._idle.put(worker)


def grade_math(grader: Grader, pairs: Sequence[tuple[str, str | None]]) -> list[Grade]:
    """Grade ``(gold, answer)`` pairs with a grader of kind ``math``; equal text needs no worker, ``None`` scores 0."""
    waiting = [i for i, (gold, answer) in enumerate(pairs) if answer is not None and gold.strip() != answer.strip()]
    grades = [Grade(float(answer is not None)) for _, answer in pairs]
    judged = grader.grade_all([{"gold": pairs[i][0], "answer": pairs[i][1]} for i in waiting])
    for i, grade in zip(waiting, judged, strict=True):
        grades[i] = grade
    return grades
