"""Options that users give an engine under its own names, and which of them are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracefp4.errors import EngineError


def refuse_options(
    options: Mapping[str, Any], engine: str, *, one: Mapping[str, str], refused: Mapping[str, str]
) -> None:
    """Refuse options under which guidance would be wrong.

    Args:
        options: ``rollout.options``.
        engine: its name, for the sentence.
        one: options that must be 1, and what they are.
        refused: options that cannot be given, and why.

    Raises:
        EngineError: naming the option.
    """
    for name, value in options.items():
        if name in one and value not in (1, None):
            raise EngineError(
                f"rollout.options.{name} = {value}: {one[name]} is not supported with guidance in {engine}; set it to 1"
            )
        if name in refused and value:
            raise EngineError(f"rollout.options.{name} = {value!r} is refused: {refused[name]}; leave it out")
