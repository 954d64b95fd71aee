"""What ``tracefp4 bench`` was asked for, and which case has a use for what.

One command measures eleven cases, and no option is for all of them. One that a case does not use is refused: a figure
that was asked for in vain looks like one that was measured. Where a case takes batches or contexts, several are a
sweep over all pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from tracefp4.errors import ConfigError, suggest

USES: dict[str, tuple[str, ...]] = {
    "codec": ("rows",),
    "qat": ("rows",),
    "attention": ("batch", "context", "shape", "chunk"),
    "experts": ("batch", "shape", "arm", "skew", "quick"),
    "delta": ("batch",),
    "decode": ("batch", "context", "shape", "arm", "budget", "compile", "state-dtype", "layers"),
    "prefill": ("batch", "context", "shape", "arm", "compile", "layers", "chunk"),
    "capture": ("batch", "context", "shape", "arm", "compile", "state-dtype", "layers"),
    "rollout": ("shape", "compile", "layers"),
    "train": ("batch", "context", "shape", "arm", "recompute"),
    "frames": ("batch", "context", "shape"),
}
"""Options of each case, beside those of all of them."""
CASES = tuple(USES)
"""What can be measured."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of one call; an empty tuple leaves the choice to the case."""

    case: str
    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    shapes: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    budget: float | None = None
    compiled: bool = False
    state_dtype: str = "float32"
    skew: float = 0.0
    quick: bool = False
    rows: int = 16384
    layers: int | None = None
    recompute: bool = False
    chunk: int | None = None

    def sweep(self, batch: int, context: int) -> Iterator[tuple[int, int]]:
        """All pairs of a batch and a context, with one of each by default."""
        return product(self.batches or (batch,), self.contexts or (context,))


def check_case(case: str, given: Collection[str]) -> None:
    """Refuse a case that does not exist, and options that it has no use for.

    Args:
        case: the word after ``bench``.
        given: options that stand on the command line, without dashes.

    Raises:
        ConfigError: naming the nearest case, or what the case uses and who uses the option.
    """
    if case not in USES:
        raise ConfigError(f"unknown benchmark {case!r}{suggest(case, CASES)}")
    known = {option for options in USES.values() for option in options}
    for option in given:
        if option in known and option not in USES[case]:
            others = ", ".join(name for name, options in USES.items() if option in options)
            own = ", ".join(f"--{name}" for name in USES[case])
            raise ConfigError(f"bench {case} does not use --{option}, which is for {others}; its own options are {own}")


def check_names(names: tuple[str, ...], known: Any, what: str) -> None:
    """Refuse names that are not in ``known``.

    Raises:
        ConfigError: naming the nearest.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}{suggest(name, tuple(known))}")
