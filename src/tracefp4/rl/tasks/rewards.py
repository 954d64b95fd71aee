"""Reward functions of a user, by import path, with the signatures that other trainers use.

``load_reward("package.module:function")`` accepts, told apart by the names of the parameters,

=======  ======================================================================  ==========================
style    signature                                                               returns
=======  ======================================================================  ==========================
verl     ``compute_score(data_source, solution_str, ground_truth, extra_info)``  a number, or a mapping with ``score``
TRL      ``f(prompts, completions, **columns)``                                  one number a completion
simple   ``f(completion, answer)``                                               a number
=======  ======================================================================  ==========================

A simple function may call its parameters as it likes; further ones without a default are not understood. TRL functions
get prompts and completions as conversations if the prompt is one, as TRL does, and the answer and all metadata of the
items as columns.

This module is imported by grading workers, so it stays light.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracefp4.errors import TaskError


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One completion to be judged; plain data, so that it can travel to a worker as JSON."""

    completion: str
    answer: Any = None
    prompt: Any = None
    """Text, or a list of ``{"role": ..., "content": ...}``."""
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row, and the fields of ``extra_info``."""


Reward = Callable[[Sequence[RewardCall]], list[float]]


def load_reward(path: str) -> Reward:
    """Import a reward function and adapt its signature.

    Args:
        path: ``package.module:function``.

    Returns:
        A function from calls to rewards. It raises what the user's function raises, and :class:`TaskError` if that
        returns something that is not a finite number.

    Raises:
        TaskError: no such module or function, or a signature that is none of the three.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not name:
        raise TaskError(f"reward {path!r} is not of the form 'package.module:function'")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise TaskError(f"reward {path!r}: module {module_name!r} cannot be imported ({error})") from error
    except AttributeError as error:
        raise TaskError(f"reward {path!r}: module {module_name!r} has no {name!r}") from error
    return adapt(function, path)


def adapt(function: Callable[..., Any], label: str) -> Reward:
    """Adapt a reward function of any of the three styles; ``label`` names it in errors."""
    if not callable(function):
        raise TaskError(f"reward {label!r} is not a function")
    parameters = inspect.signature(function).parameters
    if {"solution_str", "ground_truth"} <= set(parameters):
        return _each(lambda call: _verl(function, parameters, call), label)
    if {"prompts", "completions"} <= set(parameters) or ("completions" in parameters and _open(parameters)):
        return lambda calls: [_number(value, label) for value in _trl(function, parameters, calls, label)]
    if _positional(parameters) == 2:
        return _each(lambda call: function(call.completion, call.answer), label)
    raise TaskError(
        f"reward {label!r} has the signature {inspect.signature(function)}; accepted are (completion, answer), "
        "(data_source, solution_str, ground_truth, extra_info) and (prompts, completions, **columns)"
    )


def _each(judge: Callable[[RewardCall], Any], label: str) -> Reward:
    return lambda calls: [_number(judge(call), label) for call in calls]


def _verl(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], call: RewardCall) -> Any:
    given = {
        "data_source": call.data_source,
        "solution_str": call.completion,
        "ground_truth": call.answer,
        "extra_info": dict(call.extra),
    }
    result = function(**{k: v for k, v in given.items() if k in parameters or _open(parameters)})
    return result.get("score") if isinstance(result, Mapping) else result


def _trl(
    function: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    calls: Sequence[RewardCall],
    label: str,
) -> Sequence[Any]:
    columns: dict[str, list[Any]] = {
        "prompts": [call.prompt for call in calls],
        "completions": [
            call.completion if isinstance(call.prompt, str) else [{"role": "assistant", "content": call.completion}]
            for call in calls
        ],
        "answer": [call.answer for call in calls],
    }
    for key in sorted({key for call in calls for key in call.extra}):
        columns.setdefault(key, [call.extra.get(key) for call in calls])
    given = columns if _open(parameters) else {k: v for k, v in columns.items() if k in parameters}
    values = list(function(**given))
    if len(values) != len(calls):
        raise TaskError(f"reward {label!r} returned {len(values)} values for {len(calls)} completions")
    return values


def _number(value: Any, label: str) -> float:
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        number = float(value)
        if math.isfinite(number):
            return number
    raise TaskError(f"reward {label!r} returned {value!r}, not a finite number")


def _open(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _positional(parameters: Mapping[str, inspect.Parameter]) -> int:
    """Positional parameters that must be given; -1 if a keyword-only one must be given too."""
    required = [p for p in parameters.values() if p.default is inspect.Parameter.empty]
    if any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in required):
        return -1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional for p in required)
