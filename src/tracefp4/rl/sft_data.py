"""Data of the supervised warm start: prompts with a completion to imitate.

The completion is the item's *target*: its answer in the format that the reward looks for. After imitating a few
thousand of them a small model answers in the right format and is sometimes right, which is what RL needs: groups in
which some samples succeed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracefp4.errors import TaskError
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.tasks.base import Task, TaskItem

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its completion, which ends with the end-of-sequence token."""


def gold_pairs(items: Sequence[TaskItem], prompter: Prompter) -> list[Pair]:
    """Encode items with their targets.

    Raises:
        TaskError: an item without a target; some tasks check answers without knowing one.
    """
    pairs = []
    for item in items:
        if item.target is None:
            raise TaskError(f"item {item.id!r} has no known answer to imitate; set warm_start.steps = 0 for this task")
        pairs.append((prompter.encode(item), prompter.encode_completion(item.target)))
    return pairs


def check_targets(task: Task, n: int = 8, seed: object = 0) -> None:
    """Make sure that what a warm start imitates earns the full reward.

    Raises:
        TaskError: a target that does not, with its score.
    """
    items = [item for item in task.items("train", n, seed) if item.target is not None]
    if task.score_range is None or not items:
        return
    scores = task.score_all(items, [item.target or "" for item in items])
    for item, score in zip(items, scores, strict=True):
        if score < task.score_range[1]:
            raise TaskError(
                f"the target {item.target!r} of item {item.id!r} scores {score:g}, not {task.score_range[1]:g}: the "
                "task's target and its extraction rule disagree"
            )
