"""Putting wrappers around functions of vLLM, in every module that has them by name.

vLLM has plugin points for whole layers and backends, not for the quantizers inside its kernels' wrappers. To look on
there, and only there, functions are replaced by wrappers that call them. ``from module import name`` copies a
reference, so all of vLLM's loaded modules are searched for the original; what is imported later finds the wrapper.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

_MARK = "__tracefp4_wraps__"


class Hook(Protocol):
    """What is bound: see :class:`tracefp4.integrations.vllm.native.Hook`."""

    @property
    def target(self) -> str:
        """``module:attribute`` or ``module:class.method``."""
        ...

    @property
    def method(self) -> str:
        """Of the watch."""
        ...


def find(target: str) -> tuple[Any, str, Any] | None:
    """Owner, name and function of ``module:attribute`` or ``module:class.method``; ``None`` if it is not there."""
    module, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return None
    *above, name = path.split(".")
    for part in above:
        owner = getattr(owner, part, None)
    found = getattr(owner, name, None)
    return None if found is None else (owner, name, found)


def bind(hooks: Iterable[Hook], watch: Any) -> list[Callable[[], None]]:
    """Wrap what ``hooks`` name; twice is once. Returns what undoes it."""
    undo: list[Callable[[], None]] = []
    for hook in hooks:
        found = find(hook.target)
        if found is None or hasattr(found[2], _MARK):
            continue
        owner, name, original = found
        wrapper = _wrap(original, getattr(watch, hook.method))
        for place in [owner, *_importers(owner, name, original)]:
            setattr(place, name, wrapper)
            undo.append(functools.partial(setattr, place, name, original))
    return undo


def _wrap(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, _MARK, original)
    return wrapper


def _importers(owner: Any, name: str, original: Any) -> list[Any]:
    modules = [module for key, module in list(sys.modules.items()) if key.startswith("vllm.")]
    return [m for m in modules if m is not owner and vars(m).get(name) is original]
