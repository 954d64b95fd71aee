"""Every error that tracefp4 raises on purpose.

One hierarchy, so that a caller can catch :class:`TraceError` and print one sentence. Each class is also the standard
error that a reader would expect (a bad value is a ``ValueError``), so code that knows nothing of tracefp4 handles it.
A message says what is wrong, where, and the nearest valid value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TraceError(Exception):
    """Base of all errors of this package. The command line prints it as one sentence and exits with code 2."""


class ConfigError(TraceError, ValueError):
    """A setting is unknown, of the wrong type, or impossible together with another one."""


class FormatError(TraceError, ValueError):
    """A tensor cannot be stored in a number format: wrong size, dtype or value."""


class ModelError(TraceError, ValueError):
    """A model cannot be loaded, converted, or bound to quantization sites."""


class CoverageError(ModelError):
    """Modules that the spec quantizes were not reached on one of the two sides."""


class GuidanceError(TraceError, ValueError):
    """Guidance cannot be used. The subclasses say why."""


class GuidanceCorrupt(GuidanceError):
    """A frame is truncated, altered, or no frame of ours at all."""


class GuidanceMismatch(GuidanceError):
    """A sound frame belongs to other tokens, another plan, another model or other numerics."""


class GuidanceMissing(GuidanceError, LookupError):
    """No guidance is stored under a handle."""


class GuidanceStale(GuidanceError):
    """A frame was recorded with weights that are too old for this use."""


class EngineError(TraceError, RuntimeError):
    """The rollout engine refuses a request or failed."""


class SyncError(EngineError):
    """Weights on the two sides differ after a weight sync, or a sync is incomplete."""


class CheckpointError(TraceError, RuntimeError):
    """A checkpoint is incomplete, altered, or belongs to another run."""


class TrainingError(TraceError, RuntimeError):
    """The trainer was asked for something that it cannot do in its present state."""


class TaskError(TraceError, ValueError):
    """A task, a data file or a reward function cannot be used."""


class NonFiniteError(TraceError, ArithmeticError):
    """A loss or gradient is NaN or infinite; the optimizer step was not applied."""


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest valid name, or the list of valid names.

    Args:
        name: what the user wrote.
        valid: the names that would have been accepted.
    """
    options = list(valid)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (valid: {', '.join(options)})"
