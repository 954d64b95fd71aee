"""Procedural tasks of the reasoning-gym package: problems without end, from a seed, with nothing to download.

A generator is chosen by name with the parameters it documents, or several are mixed by weight. Its questions are long
(a small model with byte tokens would spend its context on "State the final answer to the following arithmetic
problem"), so a ``template`` may render the metadata instead: ``"{expression}="``.

    [task]
    kind = "reasoning_gym"
    name = "chain_sum"
    [task.options]
    config = {min_terms = 2, max_terms = 3, min_digits = 1, max_digits = 1}
    template = "{expression}="
    extract = "last_line"

**Splits.** Train and eval problems are generated from different seeds. In a small space (one-digit sums) different
seeds still give the same problem, so a share ``holdout`` of all *questions*, chosen by their hash, belongs to ``eval``
alone.

**Scoring.** ``strict``: 1 if the generator's own scorer gives full marks to the extracted answer, else 0. ``lenient``:
the scorer's mark as it is; many give credit for an answer that merely contains the right one. ``exact``: 1 if the text
is the generator's answer, no scorer involved. Some scorers can be gamed (one gives full marks to any text), so a few
nonsense answers are tried before the first step, and a scorer that likes them is refused. A problem whose own answer
does not earn full marks is not drawn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import Field

from tracefp4.errors import ConfigError, TaskError, suggest
from tracefp4.rl.grading import Grader
from tracefp4.rl.tasks.answers import check_rules, extract, wrap
from tracefp4.rl.tasks.base import BaseTask, TaskItem, TaskOptions, check_split, held_out, read_options, stable_hash
from tracefp4.rl.tasks.guards import IN_WORKER, admissible, check_generator
from tracefp4.rl.tasks.templates import render

_SPLIT_BASE = {"train": 0, "eval": 1 << 31}
_SIZE = 500
_TRIES = 512
"""Problems generated for one position until one falls into the wanted split."""
_NONSENSE = ("0", "x", "[]", "no answer")
_DATA_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What third-party scorers raise on odd text; the answer then scores 0 and is counted."""


class ReasoningGymOptions(TaskOptions):
    """``[task.options]`` of ``kind = "reasoning_gym"``."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the generator."""
    template: str = "{question}"
    """Prompt: ``{question}``, ``{answer}`` or any field of the generator's metadata."""
    target: str = ""
    """Completion to imitate in a warm start, with the same fields; empty: the answer as ``extract`` finds it."""
    extract: str | list[str] = "tag"
    """How the answer is found (:mod:`tracefp4.rl.tasks.answers`); several rules are tried in order."""
    scoring: Literal["strict", "lenient", "exact"] = "strict"
    """What a right answer is."""
    format_reward: float = Field(0.0, ge=0, lt=1)
    """Share of the reward that is paid for an answer found by the first rule, right or wrong."""
    holdout: float = Field(0.1, ge=0, lt=1)
    """Share of all questions that only ``eval`` sees; 0 separates the splits by seed alone."""
    generators: list[dict[str, Any]] = Field(default_factory=list)
    """Several generators: tables with ``name``, ``weight`` (1), ``config``, ``template``, ``target``."""


@dataclass(slots=True)
class _Source:
    """One generator: draws entries by split and number, and scores answers."""

    name: str
    weight: float
    config: dict[str, Any]
    template: str
    target: str
    scorer: Any
    """Any data set of this generator: scoring does not depend on the seed."""
    datasets: dict[int, Any]
    """By base seed; empty for a generator that holds a list of problems, which is made anew for each."""

    def entry(self, base: int, number: int) -> tuple[dict[str, Any], int, int]:
        """The entry, and the seed and index that make it again."""
        if self.datasets:
            return self.datasets[base][number], base, number
        return _create(self.name, self.config, base + number)[0], base + number, 0


class ReasoningGymTask(BaseTask):
    """One reasoning-gym generator, or several by weight.

    Args:
        name: generator name; with ``options["generators"]`` just a label.
        options: see :class:`ReasoningGymOptions`.

    Raises:
        ConfigError: unknown generator, parameter, rule or field, with the nearest valid name; a scorer that evaluates
            answers unreviewed, or that nonsense satisfies.
        TaskError: the package is not installed.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name or "reasoning_gym")
        self.options = read_options(ReasoningGymOptions, options)
        self.rules = check_rules(self.options.extract)
        tables = self.options.generators or [{"name": name}]
        self._sources = {s.name: s for s in (self._source(table) for table in tables)}
        if len(self._sources) < len(tables):
            raise ConfigError(
                "task.options.generators names one generator twice; give it once, with the sum of weights"
            )
        evaluated = self.options.scoring != "exact" and not IN_WORKER.isdisjoint(self._sources)
        self._grader = Grader("reasoning_gym", timeout=10.0) if evaluated else None
        for source in self._sources.values():
            self._probe(source)

    def items(self, split: str, n: int, seed: object = 0, start: int = 0) -> list[TaskItem]:
        """See :meth:`tracefp4.rl.tasks.base.Task.items`.

        Raises:
            TaskError: a split for which no problem can be found (a small space with a small ``holdout``).
        """
        check_split(split)
        names, weights = list(self._sources), [s.weight for s in self._sources.values()]
        found = []
        for position in range(start, start + n):
            draw = random.Random(stable_hash(split, seed, position))
            found.append(self._draw(self._sources[draw.choices(names, weights)[0]], split, draw))
        return found

    def score_all(self, items: Sequence[TaskItem], completions: Sequence[str]) -> list[float]:
        """Rewards in ``[0, 1]``."""
        answers = [extract(completion, self.rules) for completion in completions]
        marks = self._marks(items, answers)
        weight = self.options.format_reward
        if not weight:
            return marks
        formatted = [extract(completion, self.rules[:1]) is not None for completion in completions]
        return [weight * f + (1 - weight) * m for f, m in zip(formatted, marks, strict=True)]

    def close(self) -> None:
        """End the grading worker."""
        if self._grader is not None:
            self._grader.close()

    # Drawing --------------------------------------------------------------------------------------------------------

    def _source(self, table: Mapping[str, Any]) -> _Source:
        known = {"name", "weight", "config", "template", "target"}
        for key in table:
            if key not in known:
                raise ConfigError(f"unknown key 'task.options.generators.{key}'{suggest(key, known)}")
        name, config = str(table.get("name", "")), dict(table.get("config", self.options.config))
        weight = float(table.get("weight", 1.0))
        if weight <= 0:
            raise ConfigError(f"generator {name!r} has weight {weight}; weights are positive")
        first = _create(name, config, 0)
        check_generator(name, type(first), self.options.scoring != "exact")
        datasets = {base: _create(name, config, base) for base in _SPLIT_BASE.values()} if _endless(first) else {}
        template = table.get("template", self.options.template)
        return _Source(name, weight, config, template, table.get("target", self.options.target), first, datasets)

    def _draw(self, source: _Source, split: str, draw: random.Random) -> TaskItem:
        for _ in range(_TRIES):
            entry, seed, index = source.entry(_SPLIT_BASE[split], draw.getrandbits(31))
            share = self.options.holdout
            wanted = not share or held_out(entry["question"], share) == (split == "eval")
            if wanted:
                item = self._item(source, entry, seed, index)
                if self._solvable(item):
                    return item
                self.counts["unsolvable_problem"] += 1
        raise TaskError(
            f"generator {source.name!r}: no {split} problem among {_TRIES}; its parameters allow too few different "
            f"problems for task.options.holdout = {self.options.holdout}"
        )

    def _solvable(self, item: TaskItem) -> bool:
        """Whether the problem's own answer would be accepted: some are left unsolved, or fail their own scorer."""
        name, answer = item.metadata["generator"], item.answer
        if answer is None or self.options.scoring == "exact":
            return True
        if not admissible(name, answer):
            return False
        return name in IN_WORKER or self._mark(self._sources[name].scorer, answer, item) >= 1.0

    def _item(self, source: _Source, entry: dict[str, Any], seed: int, index: int) -> TaskItem:
        where = f"generator {source.name!r}"
        answer = None if entry["answer"] is None else str(entry["answer"])
        values = {**entry["metadata"], "question": entry["question"], "answer": answer}
        target = None
        if answer is not None:
            target = render(source.target, values, where) if source.target else wrap(answer, self.rules)
        return TaskItem(
            id=f"{source.name}-{seed}-{index}",
            prompt=render(source.template, values, where),
            answer=answer,
            target=target,
            metadata={"generator": source.name, "seed": seed, "index": index, "entry": entry},
        )

    # Scoring --------------------------------------------------------------------------------------------------------

    def _marks(self, items: Sequence[TaskItem], answers: Sequence[str | None]) -> list[float]:
        marks = [0.0] * len(items)
        waiting: list[tuple[int, dict[str, Any]]] = []
        for i, (item, answer) in enumerate(zip(items, answers, strict=True)):
            name = item.metadata["generator"]
            if answer is None:
                self.counts["no_answer"] += 1
            elif self.options.scoring == "exact":
                marks[i] = float(item.answer is not None and answer == item.answer.strip())
            elif not admissible(name, answer):
                self.counts["refused"] += 1
            elif name in IN_WORKER:
                waiting.append((i, self._request(item, answer)))
            else:
                marks[i] = self._mark(self._sources[name].scorer, answer, item)
        if waiting and self._grader is not None:
            for (i, _), grade in zip(waiting, self._grader.grade_all([r for _, r in waiting]), strict=True):
                marks[i] = grade.score
                if grade.status != "ok":
                    self.counts[grade.status] += 1
        # Full marks are exactly 1: a scorer adds up credit for an answer with a tail of garbage to just below it.
        return [float(m >= 1.0) if self.options.scoring == "strict" else min(max(m, 0.0), 1.0) for m in marks]

    def _mark(self, scorer: Any, answer: str, item: TaskItem) -> float:
        try:
            return float(scorer.score_answer(answer, item.metadata["entry"]))
        except _DATA_ERRORS:
            self.counts["error"] += 1
            return 0.0

    def _request(self, item: TaskItem, answer: str) -> dict[str, Any]:
        m = item.metadata
        config = json.dumps(self._sources[m["generator"]].config)
        return {
            "generator": m["generator"],
            "config": config,
            "seed": m["seed"],
            "index": m["index"],
            "answer": answer,
        }

    def _probe(self, source: _Source) -> None:
        """Try the template, the target and some nonsense on a few problems before anything is trained."""
        items = [self._draw(source, "train", random.Random(stable_hash("probe", i))) for i in range(8)]
        for item in items:
            if item.target is not None and extract(item.target, self.rules) is None:
                raise ConfigError(
                    f"generator {source.name!r}: no answer is found in the target {item.target!r} by "
                    f"task.options.extract = {self.options.extract!r}"
                )
        if self.options.scoring == "exact" or source.name in IN_WORKER:
            return
        before = self.counts.copy()
        for nonsense in _NONSENSE:
            wrong = [i for i in items if not _same(nonsense, i.answer) and admissible(source.name, nonsense)]
            if sum(self._mark(source.scorer, nonsense, item) >= 1.0 for item in wrong) >= 3:
                raise ConfigError(
                    f"generator {source.name!r}: its scorer gives full marks to the answer {nonsense!r} whatever the "
                    "question is; set scoring = 'exact'"
                )
        self.counts = before


def _create(name: str, config: Mapping[str, Any], seed: int) -> Any:
    """A data set of the installed package; its complaints become one sentence."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise TaskError("reasoning-gym is not installed: pip install 'tracefp4[rl]'") from error
    if name not in DATASETS or name == "composite":
        raise ConfigError(f"unknown reasoning-gym generator {name!r}{suggest(name, set(DATASETS) - {'composite'})}")
    known = {field.name for field in fields(DATASETS[name][1])} - {"seed", "size"}
    for key in config:
        if key not in known:
            raise ConfigError(f"generator {name!r} has no parameter {key!r}{suggest(key, sorted(known))}")
    try:
        return create_dataset(name, **config, seed=seed, size=_SIZE)
    except (AssertionError, ValueError, TypeError) as error:  # The package checks its parameters with assert.
        raise ConfigError(f"generator {name!r} refuses its parameters: {error}") from error


def _endless(dataset: Any) -> bool:
    """Whether the generator makes a problem of any number; some hold a list of ``size`` problems."""
    try:
        dataset[(1 << 31) - 1]
    except IndexError:
        return False
    except (AssertionError, ValueError, TypeError) as error:  # Parameters that only show when a problem is made.
        raise ConfigError(f"generator {dataset.__class__.__name__} cannot work with its parameters: {error}") from error
    return True


def _same(text: str, answer: str | None) -> bool:
    """Whether nonsense happens to be the answer."""
    if answer is None or text.strip() == answer.strip():
        return True
    try:
        return float(text) == float(answer)
    except ValueError:
        return False
