r"""Where in a completion is the answer?

A rule finds the answer text in what a model wrote, and its counterpart :func:`wrap` writes an answer so that the rule
finds it again (targets of a warm start). Rules only cut text out; nothing is parsed or evaluated, and each is linear in
the length of the completion.

=============  =========================================================  ==================
rule           finds                                                      written as
=============  =========================================================  ==================
``tag``        the last ``<answer>...</answer>``                          ``<answer>7</answer>``
``boxed``      the last ``\boxed{...}``, braces balanced                  ``\boxed{7}``
``hash``       the rest of the line after the last ``####`` (GSM8K)       ``#### 7``
``number``     the last number: ``-3``, ``1,234.5``, ``2/3``              ``7``
``last_line``  the last line that is not empty                            ``7``
``whole``      everything, without surrounding white space                ``7``
=============  =========================================================  ==================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tracefp4.errors import ConfigError, suggest

# A sign counts only where no operand stands before it: the last number of "3-4" is 4.
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")
_BOXED = "\\boxed{"


def _tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if 0 <= start < end else None


def _boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOXED)
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def _hash(text: str) -> str | None:
    start = text.rfind("####")
    rest = text[start + 4 :].splitlines() if start >= 0 else []
    return rest[0].strip() if rest and rest[0].strip() else None


def _number(text: str) -> str | None:
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    return found.group() if found else None


def _last_line(text: str) -> str | None:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def _whole(text: str) -> str | None:
    return text.strip() or None


RULES: dict[str, Callable[[str], str | None]] = {
    "tag": _tag,
    "boxed": _boxed,
    "hash": _hash,
    "number": _number,
    "last_line": _last_line,
    "whole": _whole,
}

_WRITTEN = {"tag": "<answer>{}</answer>", "boxed": "\\boxed{{{}}}", "hash": "#### {}"}


def check_rules(rules: str | Sequence[str]) -> tuple[str, ...]:
    """Rule names as a tuple; raises :class:`ConfigError` for an unknown one or none at all."""
    names = (rules,) if isinstance(rules, str) else tuple(rules)
    for name in names:
        if name not in RULES:
            raise ConfigError(f"unknown extraction rule {name!r}{suggest(name, RULES)}")
    if not names:
        raise ConfigError(f"at least one extraction rule is needed (valid: {', '.join(RULES)})")
    return names


def extract(text: str, rules: Sequence[str]) -> str | None:
    """The answer by the first rule that finds one, or ``None``."""
    for name in rules:
        found = RULES[name](text)
        if found is not None:
            return found
    return None


def wrap(answer: str, rules: Sequence[str]) -> str:
    """A completion in which the first rule finds ``answer``."""
    return _WRITTEN.get(rules[0], "{}").format(answer)
