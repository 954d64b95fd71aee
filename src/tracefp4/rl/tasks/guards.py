"""Which reasoning-gym scorers evaluate what a model wrote, and what may reach those.

Several ``score_answer`` methods of reasoning-gym (read at 0.1.25) pass the answer to Python's ``eval`` or to SymPy's
``parse_expr``, which evaluates as well: a model that is rewarded for a score would be one lucky completion away from
running code, and ``9**9**9**9`` stops the run. Three things stand before that:

1. A *guard* for each of these generators: the few tokens that a right answer can consist of. An answer with anything
   else scores 0 and is counted, and never reaches the scorer.
2. Expressions can still be expensive, so scorers of expressions run in a grading worker with a time and memory limit.
3. :func:`check_generator` reads the source of whatever scorer is installed. A generator whose module evaluates text and
   that is not listed here (a later version, say) is refused until someone has looked at it.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from tracefp4.errors import ConfigError

MAX_ANSWER_CHARS = 4096
"""No right answer of any generator is longer; longer ones score 0."""

FUNCTIONS = frozenset({"sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "pi"})
"""Names of more than one letter that an expression may use."""

# One token of an expression; a text is cut into these from left to right, so matching is linear.
_TOKEN = re.compile(r"\s*(?:(?P<power>\*\*)|(?P<number>\d+(?:\.\d+)?)|(?P<name>[A-Za-z]+)|(?P<sign>[-+*/()]))")
_DECIMAL = re.compile(r"\s*[-+]?[\d,]{0,30}(?:\.\d{0,30})?(?:/[\d,]{1,30})?(?:[eE][-+]?\d{1,2})?\s*")
# Brackets, whole numbers, plain strings, and unquoted answers. A prefix could make a string an f-string, but strings
# hold no braces.
_LITERAL = re.compile(r"""(?!.*\d{10})(?:[\s\[\],_A-Z\d-]|'[A-Za-z0-9_ ]*'|"[A-Za-z0-9_ ]*")*""", re.DOTALL)


def literal(answer: str) -> bool:
    """Nested lists of whole numbers and plain strings."""
    return len(answer) <= MAX_ANSWER_CHARS and _LITERAL.fullmatch(answer) is not None


def short_number(answer: str) -> bool:
    """A number of at most 30 digits: ``fractions.Fraction`` writes 1e999999999 out in full."""
    return _DECIMAL.fullmatch(answer) is not None


def arithmetic(answer: str) -> bool:
    """Sums, products and quotients of short numbers; no power, no name, no attribute."""
    tokens = _tokens(answer, 200)
    return all(kind in ("number", "sign") for kind, _ in tokens) and not _doubled(tokens) and bool(tokens)


def expression(answer: str) -> bool:
    """Polynomials and elementary functions; an exponent is short and is not raised again."""
    tokens = _tokens(answer, 400)
    for i, (kind, text) in enumerate(tokens):
        if kind == "name" and len(text) > 1 and text not in FUNCTIONS:
            return False
        if kind == "power" and not _short_exponent(tokens[i + 1 :]):
            return False
    return not _doubled(tokens) and bool(tokens)


def _tokens(text: str, longest: int) -> list[tuple[str, str]]:
    """Kind and text of each token, or nothing if the text is too long or holds anything else."""
    found, position = [], 0
    text = text.strip()
    while position < len(text) <= longest:
        match = _TOKEN.match(text, position)
        if match is None or len(match.group()) > 12:
            return []
        found.append((match.lastgroup or "", match.group().strip()))
        position = match.end()
    return found


def _doubled(tokens: Sequence[tuple[str, str]]) -> bool:
    # "* *" would be a power to a reader that skips blanks, and "2x" or "x(1)" a call.
    pairs = list(pairwise(tokens))
    stars = any(a[1] in ("*", "**") and b[1] in ("*", "**") for a, b in pairs)
    operands = any(
        (a[0] in ("number", "name") or a[1] == ")")
        and (b[0] in ("number", "name") or b[1] == "(")
        and a[1] not in FUNCTIONS
        for a, b in pairs
    )
    return stars or operands


def _short_exponent(rest: Sequence[tuple[str, str]]) -> bool:
    """Whether tokens after a power begin with ``9``, ``-9``, ``(9)`` or ``(1/2)`` and no second power follows."""
    flat = " ".join(text for _, text in rest[:7])
    return re.match(r"(-? ?\d{1,2}|\( -? ?\d{1,2}( / \d{1,2})? \))(?! ?[\d.*]* ?\*\*)(?![\d.])", flat) is not None


GUARDS: dict[str, Callable[[str], bool]] = {
    "binary_matrix": literal,
    "n_queens": literal,
    "spiral_matrix": literal,
    "string_insertion": literal,
    "countdown": arithmetic,
    "puzzle24": arithmetic,
    "polynomial_multiplication": expression,
    "simple_integration": expression,
    "intermediate_integration": expression,
    "coin_flip": short_number,
}
"""By generator: whether an answer may be given to its scorer."""

IN_WORKER = frozenset(name for name, guard in GUARDS.items() if guard in (arithmetic, expression))
"""Generators whose scorer parses an expression."""

REVIEWED = frozenset(
    {
        "basic_arithmetic",  # evaluates its own expression when it generates
        "bitwise_arithmetic",  # the same; the answer goes through int(answer, 16)
        "codeio",  # runs its own program when it generates; the answer goes through json
        "number_sorting",  # evaluates its own answer; the model's goes through json
        "propositional_logic",  # has a parser of its own, of the same name
    }
)
"""Generators whose module evaluates text, though never an answer."""

UNORDERED = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Generators that iterate over sets of strings: their problems depend on the process's hash seed."""

_EVALUATING = frozenset({"eval", "exec", "parse_expr", "sympify", "literal_eval", "Fraction", "compile", "__import__"})


def check_generator(name: str, dataset_class: type, scored: bool) -> None:
    """Refuse a generator that is not reproducible here, or whose module evaluates text and that nobody has reviewed.

    Args:
        name: of the generator.
        dataset_class: what is installed.
        scored: whether its own scorer is used.

    Raises:
        ConfigError: with the way out: a fixed hash seed, or ``scoring = "exact"``.
    """
    if name in UNORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"generator {name!r} makes other problems in every process unless Python's hash seed is fixed; start with "
            "PYTHONHASHSEED=0 in the environment"
        )
    if not scored:
        return
    if name in GUARDS or name in REVIEWED:
        return
    calls = _evaluating_calls(dataset_class)
    if calls:
        raise ConfigError(
            f"the scorer of generator {name!r} may evaluate what a model wrote ({', '.join(sorted(calls))} in its "
            "source) and has not been reviewed; set scoring = 'exact' to compare text instead"
        )


def admissible(name: str, answer: str) -> bool:
    """Whether ``answer`` may be given to the scorer of generator ``name``."""
    return len(answer) <= MAX_ANSWER_CHARS and GUARDS.get(name, _any)(answer)


def _any(answer: str) -> bool:
    return True


def _evaluating_calls(dataset_class: type) -> set[str]:
    tree = ast.parse(inspect.getsource(sys.modules[dataset_class.__module__]))
    return {_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)} & _EVALUATING


def _name(node: Any) -> str:
    # re.compile is no evaluation: an attribute counts only for the names that mean the same anywhere.
    if isinstance(node, ast.Attribute):
        return "" if node.attr == "compile" else node.attr
    return getattr(node, "id", "")
