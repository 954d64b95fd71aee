"""The configuration as text: TOML that reads back to an equal tree, and the page of all keys."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from tracefp4.config import Config


def to_toml(config: Config) -> str:
    """Write the resolved configuration as TOML that :func:`tracefp4.config.load` reads back to an equal tree."""
    data = config.model_dump(mode="json")
    lines = [f"{key} = {_toml(value)}" for key, value in data.items() if not isinstance(value, dict)]
    for key, value in data.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]"] + [f"{name} = {_toml(item)}" for name, item in value.items()]
    return "\n".join(lines) + "\n"


def reference() -> str:
    """All keys as Markdown: name, type, default, meaning. ``docs/configuration.md`` is this text."""
    lines = [
        "# Configuration",
        "",
        "A run is one TOML file. Every key, its type, its default and its meaning; unknown keys are refused.",
        "`--set a.b=value` on the command line overrides a key. "
        "`tracefp4 train CONFIG --dry-run` prints the resolved file.",
        "",
        *_reference(Config, ""),
    ]
    for name, field in Config.model_fields.items():
        table = field.annotation
        if isinstance(table, type) and issubclass(table, BaseModel):
            lines += ["", f"## `[{name}]`", "", (table.__doc__ or "").strip(), "", *_reference(table, f"{name}.")]
    return "\n".join(lines) + "\n"


def _reference(model: type[BaseModel], prefix: str) -> list[str]:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            continue
        default = field.get_default(call_default_factory=True)
        text = str(kind).replace("typing.", "") if not isinstance(kind, type) else kind.__name__
        text = text.replace("|", "\\|")
        meaning = (field.description or "").replace("\n", " ")
        rows.append(f"| `{prefix}{name}` | {text} | `{_toml(default)}` | {meaning} |")
    return rows


def _toml(value: Any) -> str:
    # JSON scalars and arrays are valid TOML; only mappings differ.
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
