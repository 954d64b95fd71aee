"""The process in which answers are judged. Started by :mod:`tracefp4.rl.grading`; not for import.

One JSON object a line in, one a line out. The first line says what to be (``kind``) and the limits; every further one
is a request, answered by ``{"id": ..., "score": ..., "status": "ok"}`` or by a status that says why there is no
score. Replies go to a private copy of standard output, and whatever graded code prints goes nowhere, so nothing it
prints can pose as a reply.

What is contained: time (the parent kills), address space (``RLIMIT_AS``), core dumps, and, while a scorer of ours runs,
an audit hook inside the interpreter that refuses network, processes, writing files, and compiling any text but number
literals. An audit hook is a second line, not a sandbox: it stands behind scorers that are not meant to run a model's
text in the first place.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

Handler = Callable[[dict[str, Any]], float]

_FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "pty.spawn")
_FORBIDDEN += ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.kill", "shutil.", "ctypes.", "ftplib.")
# How SymPy reads the digits that its LaTeX grammar recognised as a number; no name but these two can occur.
_LITERAL = re.compile(rb"\s*(from sympy import \*|(Integer|Float) \('?[0-9.eE+-]{1,4096}'?\s*\))\s*")


class Refused(Exception):
    """The audit hook stopped something."""


def main() -> None:
    """Serve until standard input ends."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    setup = json.loads(sys.stdin.readline())
    _limit(int(setup.get("memory_mb", 0)))
    try:
        handler = HANDLERS[setup["kind"]](setup)
        _reply(channel, {"ready": True})
    except Exception as error:  # The boundary of a process: the parent turns this into a typed error.
        _reply(channel, {"ready": False, "error": f"{type(error).__name__}: {error}"[:2000]})
        return
    for line in sys.stdin:
        request = json.loads(line)
        _limit_cpu(float(request["timeout"]))
        reply, alive = _serve(handler, request["payload"])
        _reply(channel, {"id": request["id"], **reply})
        if not alive:
            return


def _serve(handler: Handler, payload: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The reply to one request, and whether this process is still fit to serve."""
    try:
        return {"score": float(handler(payload)), "status": "ok"}, True
    except Refused as error:
        return {"status": "refused", "detail": str(error)}, True
    except MemoryError:
        return {"status": "memory", "detail": "the worker's memory limit"}, False
    except Exception as error:  # The boundary of a process: no text of a model may end it.
        return {"status": "error", "detail": f"{type(error).__name__}: {error}"[:500]}, True


def _reply(channel: Any, value: dict[str, Any]) -> None:
    channel.write(json.dumps(value).encode("ascii") + b"\n")


def _limit(memory_mb: int) -> None:
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(seconds: float) -> None:
    # The parent's clock decides. This one ends a busy worker whose parent is gone.
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used.ru_utime + used.ru_stime + seconds) + 5
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _guard(compiling: bool) -> None:
    """Install the audit hook; ``compiling`` lets scorers compile text (which their guards have checked)."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "compile" and not compiling and args[0] is not None and str(args[1]) == "<string>":
            source = args[0] if isinstance(args[0], bytes) else str(args[0]).encode("utf-8", "replace")
            if not _LITERAL.fullmatch(source):
                raise Refused("compiling text that is not a number")
        elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            raise Refused("opening a file for writing")
        elif event.startswith(_FORBIDDEN):
            raise Refused(event)

    sys.addaudithook(hook)


def _math(setup: dict[str, Any]) -> Handler:
    """Equality of two mathematical answers by math-verify, LaTeX grammar only.

    math-verify's grammar for plain expressions hands text to SymPy's ``parse_expr``, which evaluates it as Python. Its
    LaTeX grammar is an ANTLR parser, and reads ``3/4`` or ``2^{10}`` just as well, so it is the only one used.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    grammar = [LatexExtractionConfig()]

    def read(text: str) -> list[Any]:
        inner = text.strip().strip("$").strip()
        return parse(f"${inner}$", grammar, fallback_mode="no_fallback", parsing_timeout=0)

    def equal(payload: dict[str, Any]) -> float:
        gold, answer = read(payload["gold"]), read(payload["answer"])
        return float(bool(gold) and bool(answer) and verify(gold, answer, timeout_seconds=0))

    # Import what SymPy imports late, before the hook refuses to compile.
    for gold, answer in (("\\{1,2\\}", "2,1"), ("[0,1)", "0\\le x<1"), ("x^2+1=\\sqrt{2}", "1+x^2=2^{1/2}")):
        equal({"gold": gold, "answer": answer})
    _guard(compiling=False)
    return equal


def _reasoning_gym(setup: dict[str, Any]) -> Handler:
    """Scorers of reasoning-gym that parse an answer as an expression; the parent has let only checked text through."""
    import reasoning_gym
    import sympy.parsing.sympy_parser

    @lru_cache(maxsize=16)
    def dataset(generator: str, config: str, seed: int) -> Any:
        return reasoning_gym.create_dataset(generator, **json.loads(config), seed=seed, size=500)

    @lru_cache(maxsize=4096)
    def entry(generator: str, config: str, seed: int, index: int) -> Any:
        return dataset(generator, config, seed)[index]

    def score(payload: dict[str, Any]) -> float:
        key = payload["generator"], payload["config"], payload["seed"]
        return dataset(*key).score_answer(payload["answer"], entry(*key, payload["index"]))

    sympy.parsing.sympy_parser.parse_expr("1+1")
    _guard(compiling=True)
    return score


def _function(setup: dict[str, Any]) -> Handler:
    """A user's reward function: code that is trusted, fed with text that is not."""
    from tracefp4.rl.tasks.rewards import RewardCall, load_reward

    reward = load_reward(setup["path"])
    return lambda payload: reward([RewardCall(**payload)])[0]


HANDLERS: dict[str, Callable[[dict[str, Any]], Handler]] = {
    "math": _math,
    "reasoning_gym": _reasoning_gym,
    "function": _function,
}


if __name__ == "__main__":
    main()
