"""Tasks from files: prompts and answers in JSONL or parquet, judged by a rule or by a reward function.

    [task]
    kind = "files"
    name = "gsm8k"
    [task.options]
    train = "gsm8k/train.parquet"
    eval = "gsm8k/test.parquet"
    reward = "math"
    extract = ["boxed", "number"]

``reward`` is ``exact`` (equal text), ``number`` (equal value), ``math`` (math-verify, in worker processes) or
``package.module:function``, which gets the whole completion and judges in whatever way it likes
(:mod:`tracefp4.rl.tasks.rewards`). With ``isolate = true`` the function runs in worker processes with a time and memory
limit.

Without an ``eval`` file, a share ``holdout`` of the prompts, chosen by their hash, is held out. A training step takes
its prompts from a shuffle that its seed decides, without repetition until the data is used up.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from pydantic import Field

from tracefp4.errors import ConfigError, TaskError
from tracefp4.rl.grading import Grade, Grader, grade_math
from tracefp4.rl.tasks.answers import check_rules, extract, wrap
from tracefp4.rl.tasks.base import BaseTask, TaskItem, TaskOptions, check_split, held_out, read_options, stable_hash
from tracefp4.rl.tasks.rewards import Reward, RewardCall, load_reward
from tracefp4.rl.tasks.rows import (
    ANSWER_COLUMNS,
    PROMPT_COLUMNS,
    look_up,
    pick_column,
    read_rows,
    to_answer,
    to_prompt,
)

RULE_REWARDS = ("exact", "number", "math")
_NUMBER = re.compile(r"[-+]?\d{1,40}(?:\.\d{0,40})?(?:/\d{1,40})?")


class FilesOptions(TaskOptions):
    """``[task.options]`` of ``kind = "files"``."""

    train: str | list[str]
    """Files to train on."""
    eval: str | list[str] = Field(default_factory=list)
    """Files to evaluate on; empty: ``holdout`` of the training prompts."""
    holdout: float = Field(0.1, ge=0, lt=1)
    """Share of prompts held out where there is no ``eval`` file."""
    prompt_column: str = ""
    """Empty: recognised by name; ``a.b`` is a field of a structure."""
    answer_column: str = ""
    """Empty: recognised by name; ``a.b`` is a field of a structure."""
    reward: str = "exact"
    """``exact``, ``number``, ``math`` or ``package.module:function``."""
    extract: str | list[str] = "tag"
    """How the answer is found, for the first three; several rules are tried in order."""
    format_reward: float = Field(0.0, ge=0, lt=1)
    """Share of the reward that is paid for an answer found by the first rule; for the first three."""
    isolate: bool = False
    """Run the reward function in worker processes."""
    workers: int = Field(2, gt=0)
    """Worker processes of ``math`` and of isolated functions."""
    timeout: float = Field(5.0, gt=0)
    """Seconds that judging one completion may take in a worker."""
    memory_mb: int = Field(0, ge=0)
    """Address space of a worker of an isolated function; 0 is 16 GiB."""


class FilesTask(BaseTask):
    """Prompts and answers from files.

    Args:
        name: label in metrics.
        options: see :class:`FilesOptions`.

    Raises:
        ConfigError: options that are unknown or contradict each other.
        TaskError: a file, a row or a reward function that cannot be used; the message names file and row.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name or "files")
        self.options = read_options(FilesOptions, options)
        self.rules = check_rules(self.options.extract)
        self._reward: Reward | None = None
        self._grader: Grader | None = None
        self._set_up_reward()
        self._rows = self._load()

    def items(self, split: str, n: int, seed: object = 0, start: int = 0) -> list[TaskItem]:
        """See :meth:`tracefp4.rl.tasks.base.Task.items`.

        ``train`` goes on with a new shuffle when the data is used up; ``eval`` never repeats an item, so it returns at
        most as many as there are.
        """
        check_split(split)
        rows = self._rows[split]
        stop = min(start + n, len(rows)) if split == "eval" else start + n
        found: list[TaskItem] = []
        for epoch in range(start // len(rows), (max(stop, 1) - 1) // len(rows) + 1):
            first, last = max(start - epoch * len(rows), 0), min(stop - epoch * len(rows), len(rows))
            order = list(_shuffle(len(rows), last, random.Random(stable_hash(split, seed, epoch))))
            found += [rows[i] for i in order[first:]]
        return found

    def score_all(self, items: Sequence[TaskItem], completions: Sequence[str]) -> list[float]:
        """Rewards; in ``[0, 1]`` unless a function decides.

        Raises:
            TaskError: an isolated function that has failed on every completion so far.
        """
        if self._reward is not None:
            return self._reward([_call(item, text) for item, text in zip(items, completions, strict=True)])
        if self.score_range is None and self._grader is not None:
            calls = [_call(item, text) for item, text in zip(items, completions, strict=True)]
            return self._isolated(self._grader, calls)
        answers = [extract(text, self.rules) for text in completions]
        self.counts["no_answer"] += sum(answer is None for answer in answers)
        marks = self._marks([item.answer or "" for item in items], answers)
        weight = self.options.format_reward
        formatted = [weight > 0 and extract(text, self.rules[:1]) is not None for text in completions]
        return [weight * f + (1 - weight) * m for f, m in zip(formatted, marks, strict=True)]

    def close(self) -> None:
        """End the grading workers."""
        if self._grader is not None:
            self._grader.close()

    # Scoring --------------------------------------------------------------------------------------------------------

    def _set_up_reward(self) -> None:
        o = self.options
        if ":" not in o.reward and o.reward not in RULE_REWARDS:
            raise ConfigError(
                f"unknown task.options.reward {o.reward!r} (valid: {', '.join(RULE_REWARDS)}, package.module:function)"
            )
        if o.reward == "math":
            self._grader = Grader("math", workers=o.workers, timeout=o.timeout)
        elif ":" in o.reward:
            self.score_range: tuple[float, float] | None = None
            if o.isolate:
                setup, memory = {"path": o.reward}, o.memory_mb or None
                self._grader = Grader("function", workers=o.workers, timeout=o.timeout, memory_mb=memory, setup=setup)
            else:
                self._reward = load_reward(o.reward)

    def _marks(self, golds: Sequence[str], answers: Sequence[str | None]) -> list[float]:
        if self._grader is not None:
            grades = grade_math(self._grader, list(zip(golds, answers, strict=True)))
            self._count(grades)
            return [grade.score for grade in grades]
        equal = _equal_numbers if self.options.reward == "number" else _equal_text
        return [float(a is not None and equal(g, a)) for g, a in zip(golds, answers, strict=True)]

    def _isolated(self, grader: Grader, calls: Sequence[RewardCall]) -> list[float]:
        payloads = [{name: getattr(call, name) for name in call.__slots__} for call in calls]
        grades = grader.grade_all(payloads)
        self._count(grades)
        failed = [grade for grade in grades if grade.status == "error"]
        if failed and not grader.counts["ok"]:
            raise TaskError(f"reward {self.options.reward!r} fails on every completion: {failed[0].detail}")
        return [grade.score for grade in grades]

    def _count(self, grades: Sequence[Grade]) -> None:
        self.counts.update(grade.status for grade in grades if grade.status != "ok")

    # Reading --------------------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, list[TaskItem]]:
        o = self.options
        train = [item for path in _paths(o.train) for item in self._read(path)]
        if _paths(o.eval):
            rows = {"train": train, "eval": [item for path in _paths(o.eval) for item in self._read(path)]}
            seen = {repr(item.prompt) for item in train}
            for item in rows["eval"]:
                if repr(item.prompt) in seen:
                    raise TaskError(f"{item.id}: the prompt of this evaluation row is in the training files too")
        else:
            rows = {"train": [], "eval": []}
            for item in train:
                rows["eval" if held_out(repr(item.prompt), o.holdout) else "train"].append(item)
        for split, items in rows.items():
            if not items:
                raise TaskError(f"the {split} split of task {self.name!r} has no rows ({len(train)} rows were read)")
        return rows

    def _read(self, path: str) -> Iterator[TaskItem]:
        prompt_column = answer_column = None
        for number, (place, row) in enumerate(read_rows(path)):
            if number == 0:
                prompt_column = pick_column(row, self.options.prompt_column, PROMPT_COLUMNS, "prompt", place)
                answer_column = pick_column(row, self.options.answer_column, ANSWER_COLUMNS, "answer", place)
            if prompt_column is None or (answer_column is None and self.options.reward in RULE_REWARDS):
                what, names = ("prompt", PROMPT_COLUMNS) if prompt_column is None else ("answer", ANSWER_COLUMNS)
                columns = ", ".join(map(str, row))
                raise TaskError(f"{place}: no {what} column among {columns} (known: {', '.join(names)})")
            yield self._item(row, prompt_column, answer_column, place)

    def _item(self, row: dict[str, Any], prompt_column: str, answer_column: str | None, place: str) -> TaskItem:
        truth = look_up(row, answer_column, place) if answer_column is not None else None
        answer = to_answer(truth, place) if answer_column is not None else None
        used = {prompt_column.split(".")[0], "data_source", "extra_info"}
        extra = row.get("extra_info")
        return TaskItem(
            id=place,
            prompt=to_prompt(look_up(row, prompt_column, place), place),
            answer=answer,
            target=wrap(answer, self.rules) if answer is not None and self.options.reward in RULE_REWARDS else None,
            metadata={
                "truth": truth,
                "data_source": str(row.get("data_source") or self.name),
                "extra": {
                    **{str(k): v for k, v in row.items() if k not in used},
                    **(extra if isinstance(extra, Mapping) else {}),
                },
            },
        )


def _call(item: TaskItem, completion: str) -> RewardCall:
    prompt = item.prompt
    return RewardCall(
        completion=completion,
        answer=item.metadata["truth"],
        prompt=prompt if isinstance(prompt, str) else [{"role": m.role, "content": m.content} for m in prompt],
        data_source=item.metadata["data_source"],
        extra=item.metadata["extra"],
    )


def _paths(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) and value else list(value)


def _shuffle(size: int, count: int, rng: random.Random) -> Iterator[int]:
    """The first ``count`` places of a random order of ``size``; the cost does not depend on ``size``."""
    moved: dict[int, int] = {}
    for i in range(count):
        j = rng.randrange(i, size)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def _equal_text(gold: str, answer: str) -> bool:
    return gold.strip() == answer.strip()


def _equal_numbers(gold: str, answer: str) -> bool:
    texts = [text.strip().replace(",", "").lstrip("$").rstrip(".") for text in (gold, answer)]
    if not all(_NUMBER.fullmatch(text) for text in texts):
        return texts[0] == texts[1]
    try:
        # "1.5/2" is no fraction for the class, hence the split.
        values = [Fraction(top) / Fraction(bottom or 1) for top, _, bottom in (t.partition("/") for t in texts)]
    except ZeroDivisionError:
        return False
    return values[0] == values[1]
