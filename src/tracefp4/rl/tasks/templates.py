"""Prompt templates: ``{field}`` is replaced by the item's value, ``{{`` and ``}}`` are braces.

Only plain field names are understood, no attributes, indices or formats, so a template can reach nothing but the
fields. Lists are joined by commas, which keeps prompts short.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tracefp4.errors import ConfigError, suggest

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def render(template: str, fields: Mapping[str, Any], where: str) -> str:
    """Fill a template.

    Args:
        template: text with ``{field}`` places.
        fields: values by name.
        where: what the template belongs to, for errors.

    Raises:
        ConfigError: a field that does not exist, or a single brace.
    """

    def fill(match: re.Match[str]) -> str:
        text, name = match.group(), match.group(1)
        if text in ("{{", "}}"):
            return text[0]
        if name is None:
            raise ConfigError(f"{where}: a single {text!r} in template {template!r}; write {text * 2!r} for a brace")
        if name not in fields:
            raise ConfigError(f"{where}: template field {{{name}}} does not exist{suggest(name, fields)}")
        return show(fields[name])

    return _PART.sub(fill, template)


def show(value: Any) -> str:
    """Text of a value: lists are joined by commas, rows of a matrix by line breaks."""
    if isinstance(value, list | tuple):
        nested = any(isinstance(part, list | tuple) for part in value)
        return ("\n" if nested else ",").join(show(part) for part in value)
    return str(value)
