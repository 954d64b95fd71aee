"""One finished run of a tiny policy, for the commands that read runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracefp4.cli import main

CONFIG = """
policy = "tiny-moe"
device = "cpu"
steps = 2

[task]
kind = "reasoning_gym"
name = "chain_sum"
[task.options]
config = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
template = "{expression}="
extract = "last_line"

[warm_start]
steps = 10
batch_size = 16
lr = 3e-3

[sampling]
max_new_tokens = 4

[rollout]
max_tokens = 1024
max_batch = 32

[train]
prompts = 4
samples = 8

[eval]
items = 4
"""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, a cache and a finished run, made once."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "tiny.toml").write_text(CONFIG, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEFP4_CACHE", str(folder / "cache"))
        assert main.run(["train", str(folder / "tiny.toml"), "--set", f"output_dir={folder / 'run'}"]) == 0
    return folder


@pytest.fixture
def config(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config file; the cache is the shared one."""
    monkeypatch.setenv("TRACEFP4_CACHE", str(shared / "cache"))
    return shared / "tiny.toml"


@pytest.fixture
def trained(shared: Path, config: Path) -> Path:
    """The folder of the finished run."""
    return shared / "run"
