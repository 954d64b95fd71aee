"""What a task is: prompts that can be drawn without end, and a number for every completion.

A task is a pure function of its settings and a seed. ``items(split, n, seed)`` returns the same items on every machine,
whatever was asked before, so a resumed run sees the data that the uninterrupted run would have seen and two methods are
compared on equal prompts. The splits ``train`` and ``eval`` never share an item.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tracefp4.errors import ConfigError, TaskError, suggest

SPLITS = ("train", "eval")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One problem.

    ``prompt`` is text, or a conversation that a chat template renders. ``target`` is a completion that earns the full
    reward, where one is known: supervised warm starts imitate it. ``answer`` is what graders compare with.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: str | None = None
    target: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """What the training loop asks of a task."""

    name: str
    """Label in metrics."""
    score_range: tuple[float, float] | None
    """Smallest and largest reward, or ``None`` for a reward function that states none."""
    counts: Counter[str]
    """How often a completion could not be scored as usual, by cause; such completions get the lowest reward."""

    def items(self, split: str, n: int, seed: object = 0, start: int = 0) -> list[TaskItem]:
        """``n`` items of a split, from position ``start`` of the sequence that ``seed`` names.

        Args:
            split: ``train`` or ``eval``.
            n: how many; a finite data set returns fewer when its ``eval`` split is smaller.
            seed: anything with a stable ``repr`` (an integer, a string, a tuple of them).
            start: position in the endless sequence of this split and seed.
        """
        ...

    def score(self, item: TaskItem, completion: str) -> float:
        """Reward of one completion (text without special tokens)."""
        ...

    def score_all(self, items: Sequence[TaskItem], completions: Sequence[str]) -> list[float]:
        """Rewards of many completions; graders work on them in parallel."""
        ...

    def close(self) -> None:
        """End worker processes."""
        ...


class BaseTask(ABC):
    """Shared parts of the tasks of this package."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.score_range: tuple[float, float] | None = (0.0, 1.0)
        self.counts: Counter[str] = Counter()

    @abstractmethod
    def items(self, split: str, n: int, seed: object = 0, start: int = 0) -> list[TaskItem]:
        """See :meth:`Task.items`."""

    @abstractmethod
    def score_all(self, items: Sequence[TaskItem], completions: Sequence[str]) -> list[float]:
        """See :meth:`Task.score_all`."""

    def score(self, item: TaskItem, completion: str) -> float:
        """See :meth:`Task.score`."""
        return self.score_all([item], [completion])[0]

    def close(self) -> None:  # noqa: B027 - a task without workers has nothing to end
        """See :meth:`Task.close`."""


class PromptOptions(BaseModel):
    """How prompts are rendered (``[task.options.prompt]``); read by :class:`tracefp4.rl.prompts.Prompter`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    style: Literal["auto", "chat", "plain"] = "auto"
    """``auto``: conversations by the chat template, text as it is; ``chat``: text becomes a user message; ``plain``:
    the contents of a conversation, joined by line breaks."""
    system: str = ""
    """System message (chat) or first paragraph (plain)."""
    suffix: str = ""
    """Appended to the last user message or to the text: where an instruction on the answer format goes."""
    max_tokens: int = Field(default=0, ge=0)
    """Refuse prompts longer than this; 0 is no limit."""


class TaskOptions(BaseModel):
    """Base of the ``[task.options]`` tables."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    where: ClassVar[str] = "task.options"

    prompt: PromptOptions = PromptOptions()
    """How prompts are rendered."""


Options = TypeVar("Options", bound=BaseModel)


def read_options(model: type[Options], options: Mapping[str, Any], where: str = "task.options") -> Options:
    """Validate a table of options; raises :class:`ConfigError` with one sentence for the first fault."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
            raise ConfigError(f"unknown key '{where}.{key}'{suggest(key, model.model_fields)}") from error
        message = f"{fault['msg'][0].lower()}{fault['msg'][1:]}"
        raise ConfigError(f"config key '{where}.{key}': {message}, got {fault.get('input')!r}") from error


def check_split(split: str) -> None:
    """Raise :class:`TaskError` unless ``split`` is ``train`` or ``eval``."""
    if split not in SPLITS:
        raise TaskError(f"unknown split {split!r}{suggest(split, SPLITS)}")


def stable_hash(*parts: object, bits: int = 63) -> int:
    """An integer below ``2 ** bits`` that depends on the ``repr`` of its parts alone, on every machine and run."""
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)


def held_out(text: str, share: float) -> bool:
    """Whether an item with this text belongs to ``eval``: decided by its content, so no seed can mix the splits."""
    return stable_hash("held-out", text, bits=32) < share * 2**32
