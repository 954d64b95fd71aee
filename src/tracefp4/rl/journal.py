"""The record of a run: ``metrics.jsonl``, ``samples.jsonl``, ``evaluations.jsonl`` and, by name, a tracker.

One JSON object a line, flushed at once, so a run that dies keeps what it measured. On resume, lines at or after the
step of the checkpoint are cut off, and a last line that was not finished: they will be measured again.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tracefp4.errors import ConfigError

_FILES = ("metrics", "samples", "evaluations")


class Tracker(Protocol):
    """Something that takes scalars by name and step."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record one step."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...


class Journal:
    """Append-only record of one run.

    Args:
        folder: the run's folder.
        tracker: additional destination.
        from_step: drop recorded lines of this step and later ones (a resume).
    """

    def __init__(self, folder: Path, tracker: Tracker | None = None, from_step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._tracker = tracker
        self._streams = {name: _open(folder / f"{name}.jsonl", from_step) for name in _FILES}

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line of metrics; values that are not finite are refused by JSON and written as ``null``."""
        line = {"step": step, "time": round(time.time(), 3)} | {key: _finite(value) for key, value in values.items()}
        self._write("metrics", line)
        if self._tracker is not None:
            self._tracker.log({k: float(v) for k, v in values.items() if isinstance(v, int | float)}, step)

    def sample(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one generated sample with its reward."""
        self._write("samples", {"step": step} | dict(values))

    def evaluation(self, step: int, scores: list[float]) -> None:
        """Write the mean score of every held-out item, in the order of items: what paired comparisons need."""
        self._write("evaluations", {"step": step, "eval/scores": scores})

    def close(self) -> None:
        """Close the files and the tracker."""
        for stream in self._streams.values():
            stream.close()
        if self._tracker is not None:
            self._tracker.close()

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        self._streams[name].write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")
        self._streams[name].flush()


class NoJournal(Journal):
    """What a rank that is not the first one records: nothing."""

    def __init__(self) -> None:
        self._tracker, self._streams = None, {}

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        pass


def make_tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker | None:
    """The tracker called ``name``; raises :class:`ConfigError` when its package is not installed."""
    if name == "none":
        return None
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return _TensorBoard(SummaryWriter(str(folder)))
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"tracker {name!r} is not installed; pip install {name}, or set tracker = 'none'") from error
    return _Run(module.init(project="tracefp4", name=folder.name, config=dict(config)))


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Run:
    """wandb and trackio share this interface."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _open(path: Path, from_step: int) -> Any:
    if path.exists():
        finished = path.read_text(encoding="utf-8").rpartition("\n")[0].split("\n")
        kept = [text for text in finished if text and _is_before(json.loads(text), from_step)]
        temporary = path.with_suffix(".writing")
        temporary.write_text("".join(text + "\n" for text in kept), encoding="utf-8")
        temporary.replace(path)
    return path.open("a", encoding="utf-8")


def _is_before(line: Mapping[str, Any], step: int) -> bool:
    """Whether a run that resumes at ``step`` will not write this line again.

    An evaluation after ``step`` finished steps carries that number, as does the next training step's line; it was made
    before the checkpoint, except the one before all training.
    """
    return line["step"] < step or (line["step"] == step > 0 and any(key.startswith("eval/") for key in line))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
