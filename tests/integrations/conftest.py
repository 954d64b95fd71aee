"""What tests of the engine plugins share."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def defined() -> Callable[[str], Any]:
    """Finds a name in an engine's source, also where a machine without a GPU cannot import the module."""

    def find(target: str) -> Any:
        """What ``module.name`` or ``module.class.name`` is in source: a definition, an assignment, or an import."""
        parts = target.split(".")
        origin = Path(importlib.util.find_spec(parts[0]).origin).parent
        path = next(
            p for n in range(len(parts), 1, -1) if (p := origin.joinpath(*parts[1:n]).with_suffix(".py")).is_file()
        )
        found = {}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                found |= {alias.asname or alias.name: alias for alias in node.names}
            elif isinstance(node, ast.Assign):
                found |= {name.id: node for name in node.targets if isinstance(name, ast.Name)}
        return found.get(parts[-1])

    return find
