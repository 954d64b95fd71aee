"""Tasks: prompts, and what a completion is worth.

``base``           the protocol
``answers``        where in a completion the answer is
``reasoning_gym``  procedural tasks of the reasoning-gym package, one or several at once
``guards``         which of their scorers evaluate what a model wrote, and what may reach those
``files``          JSONL and parquet, verl's columns included
``rewards``        reward functions by import path
"""

from __future__ import annotations

from tracefp4.config import TaskConfig
from tracefp4.rl.tasks.base import BaseTask, Message, Task, TaskItem


def make_task(config: TaskConfig) -> Task:
    """Build the task that a config describes; close it when done, as it may own worker processes.

    Raises:
        ConfigError: unknown or contradicting options.
        TaskError: data or a reward function that cannot be used.
    """
    # Imported here: each kind brings its own optional package.
    if config.kind == "files":
        from tracefp4.rl.tasks.files import FilesTask

        return FilesTask(config.name, config.options)
    from tracefp4.rl.tasks.reasoning_gym import ReasoningGymTask

    return ReasoningGymTask(config.name, config.options)


__all__ = ["BaseTask", "Message", "Task", "TaskItem", "make_task"]
