"""Two ranks against one process: gradients, steps, what each reads, metrics, checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tracefp4 import config as settings
from tracefp4.errors import ConfigError
from tracefp4.rl.run import Run
from tracefp4.rl.setup import check_ranks
from tracefp4.training import checkpoint
from tracefp4.training.ranks import Ranks

pytestmark = pytest.mark.timeout(600)  # Processes that import everything, on a machine that may be busy.

WORKER = Path(__file__).with_name("sharded_run.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tree() -> dict:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("small", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found = settings.parse(module.SMALL).model_dump(mode="json")
    # Each sample is a micro-batch of its own, so that both sides multiply the same matrices.
    found["train"]["micro_tokens"] = 1
    found["optimizer"]["max_grad_norm"] = 1e6
    found["threads"] = 1
    return found


@pytest.fixture(scope="module")
def folders(tree: dict, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Gradients of one process and of two ranks."""
    return _launch("gradients", tree, cache, tmp_path_factory)


@pytest.fixture(scope="module")
def runs(tree: dict, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs of one process and of two ranks, stopped and resumed after a step."""
    return _launch("run", tree, cache, tmp_path_factory)


def _launch(what: str, tree: dict, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("sharded")
    file = root / "config.json"
    file.write_text(json.dumps(tree))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TRACEFP4_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    found = {}
    for ranks, launcher in ((1, []), (2, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])):
        found[ranks] = root / str(ranks)
        found[ranks].mkdir()
        words = [sys.executable, *launcher, str(WORKER), str(file), str(found[ranks]), what]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=580)
        assert done.returncode == 0, done.stderr[-3000:]
    return found


def _results(folders: dict[int, Path], name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    one, two = (load_file(folders[ranks] / f"{name}.safetensors") for ranks in (1, 2))
    assert one.keys() == two.keys()
    assert any(t.abs().sum() > 0 for name, t in one.items() if not name.startswith("after."))
    return one, two


@pytest.mark.parametrize("name", ["two", "one"])
def test_gradients_and_steps_of_a_sample_a_rank_are_those_of_one_process_bit_for_bit(folders, name) -> None:
    one, two = _results(folders, name)
    for key, tensor in one.items():
        assert torch.equal(tensor, two[key]), key


def test_gradients_of_more_samples_agree_within_fp32(folders) -> None:
    one, two = _results(folders, "five")
    for key, tensor in one.items():
        if not key.startswith("after."):
            torch.testing.assert_close(two[key], tensor, rtol=1e-5, atol=1e-7 * float(tensor.abs().max()), msg=key)


def test_a_rank_without_samples_of_a_minibatch_goes_along(folders) -> None:
    # Shares of two samples and one, in two minibatches each.
    one, two = _results(folders, "three")
    assert all(torch.isfinite(two[key]).all() for key in one)
    read = json.loads((folders[2] / "three.json").read_text())["read"]
    assert [len(part) for part in read] == [2, 1]


def test_each_rank_reads_the_guidance_of_its_own_rollouts(folders) -> None:
    for name, shares in {"two": [1, 1], "five": [3, 2], "one": [1, 0]}.items():
        one, two = (json.loads((folders[ranks] / f"{name}.json").read_text())["read"] for ranks in (1, 2))
        assert [len(part) for part in two] == shares
        assert sorted(two[0] + two[1]) == one[0]


def test_metrics_are_those_of_all_ranks(folders) -> None:
    for name in ("two", "five", "one"):
        one, two = (json.loads((folders[ranks] / f"{name}.json").read_text())["metrics"] for ranks in (1, 2))
        assert one.keys() == two.keys()
        for key, value in one.items():
            if key not in ("guidance/flip_rate", "guidance/scale_mismatch"):
                assert two[key] == pytest.approx(value, rel=1e-5, abs=1e-9), key


@pytest.mark.slow
def test_a_run_of_two_ranks_records_what_a_run_of_one_does(runs) -> None:
    lines = {}
    for ranks, folder in runs.items():
        text = (folder / "run" / "metrics.jsonl").read_text()
        lines[ranks] = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines[1]] == [line["step"] for line in lines[2]]
    for one, two in zip(lines[1], lines[2], strict=True):
        assert one.keys() == two.keys()
        for key in ("reward/mean", "response_length/mean", "samples/dropped", "train/tokens", "eval/chain_sum/pass@1"):
            assert one.get(key) == two.get(key), key
        for key in ("bytes_per_token", "shipped_bytes_per_token", "saved_share", "dropped_frames"):
            assert two.get(f"guidance/{key}") == pytest.approx(one.get(f"guidance/{key}")), key
    evaluations = [(folder / "run" / "evaluations.jsonl").read_text() for folder in runs.values()]
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow
def test_checkpoints_of_two_ranks_are_those_of_one_and_load_in_one(runs, cache, tmp_path, monkeypatch) -> None:
    states = []
    for folder in runs.values():
        (found,) = checkpoint.complete(folder / "run" / "checkpoints")
        states.append(checkpoint.load(found))
    assert states[0][2] == states[1][2]
    for one, two in zip(states[0][:2], states[1][:2], strict=True):
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            assert tensor.shape == two[key].shape and tensor.dtype == two[key].dtype, key
            torch.testing.assert_close(two[key], tensor, rtol=2e-2, atol=1e-2)
    monkeypatch.setenv("TRACEFP4_CACHE", str(cache))
    shutil.copytree(runs[2] / "run", tmp_path / "run")
    run = Run(settings.load(tmp_path / "run" / "config.toml", [f"output_dir={tmp_path / 'run'}"]))
    run.task.close()
    assert run.step == 2
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, states[1][0][name]), name


def test_settings_that_ranks_cannot_share_are_refused(tree) -> None:
    for change, text in (
        ({"train": tree["train"] | {"prompts": 1}}, "less than the 2 processes"),
        ({"engine": "sglang"}, "'embedded' only"),
        ({"device": "cuda:1"}, "names one device"),
        ({"plan": "auto:4096"}, "chosen by one process"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_ranks(settings.parse(tree | change), Ranks(0, 2))
        check_ranks(settings.parse(tree | change), Ranks())


def test_shares_are_whole_and_even() -> None:
    for count in (1, 2, 7, 8):
        parts = [list(range(count))[Ranks(rank, 3).share(count)] for rank in range(3)]
        assert [i for part in parts for i in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
