"""Runs of the quickstart's model that take a second: one-digit sums, a short warm start that is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tracefp4 import config as settings
from tracefp4.rl.run import Run

SUMS = {
    "kind": "reasoning_gym",
    "name": "chain_sum",
    "options": {
        "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "template": "{expression}=",
        "extract": "last_line",
    },
}
SMALL: dict[str, Any] = {
    "policy": "tiny-moe",
    "device": "cpu",
    "steps": 4,
    "task": SUMS,
    "warm_start": {"steps": 30, "batch_size": 16, "lr": 3e-3},
    "sampling": {"max_new_tokens": 4},
    "rollout": {"max_tokens": 1024, "max_batch": 32},
    "train": {"prompts": 4, "samples": 8, "gradient_checkpointing": False, "unguided_every": 1},
    "optimizer": {"lr": 1e-4},
    "eval": {"items": 4},
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the session's own, so that the warm start is made once and nothing is left behind."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make_run(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """``make_run("train.samples=4", ..., folder=...)`` builds a run of :data:`SMALL` with overrides."""
    monkeypatch.setenv("TRACEFP4_CACHE", str(cache))
    made: list[Run] = []

    def make(*overrides: str, folder: str = "run") -> Run:
        tree = settings.parse(SMALL).model_dump(mode="json")
        for item in [*overrides, f"output_dir={tmp_path / folder}"]:
            settings._override(tree, item)
        made.append(Run(settings.parse(tree)))
        return made[-1]

    yield make
    for run in made:
        run.task.close()
