"""The commands that load models, from the command line to the files that they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tracefp4.cli import main

ROW_KEYS = {
    "name",
    "plan",
    "decoder",
    "route_replay",
    "k3",
    "k3_ci",
    "mean_abs",
    "max",
    "min",
    "wrong_code_rate",
    "bytes_per_token",
}
SITE_KEYS = {"layer", "kind", "flip_rate", "scale_mismatch", "relative_difference"}


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Run a command with ``--json`` and return the one object that it prints."""
    code = main.run([*arguments, "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown
    assert shown.out.count("\n") == 1
    return json.loads(shown.out)


# train ----------------------------------------------------------------------------------------------------------------


def test_train_leaves_a_whole_run(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    records = {"metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "summary.json"}
    assert names == {"config.toml", "checkpoints", "report.html", *records}
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["step-000002"]
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [0, 0, 1, 2]
    page = (trained / "report.html").read_text(encoding="utf-8")
    assert "chain_sum" in page
    assert "No environment was recorded" not in page


def test_train_records_where_it_ran(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    assert {"torch", "transformers", "python", "device", "tracefp4"} <= summary["environment"].keys()
    assert summary["policy"]["name"] == "tiny-moe"
    assert re.fullmatch("[0-9a-f]{12}-[0-9a-f]{12}", summary["warm_start"])
    assert summary["warm_start_seconds"] >= 0


def test_train_resumes_and_prints_one_object(config: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(config), "--set", f"output_dir={trained}"]
    assert main.run([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "steps": 2,
        "interrupted": False,
        "output_dir": str(trained),
        "report": str(trained / "report.html"),
    }
    assert "trainer: the same, checked module by module" in shown.err
    assert re.search(r"guidance r1-all\+mid/s2: \d+ B a token", shown.err)


def test_train_dry_run_prints_a_config_that_loads_again(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["train", str(config), "--dry-run", "--set", "optimizer.lr=5e-4"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(text, encoding="utf-8")
    assert main.run(["train", str(tmp_path / "again.toml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == text
    assert _json(capsys, "train", str(config), "--dry-run")["steps"] == 2


def test_train_without_matplotlib_says_so_and_keeps_the_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = _json(capsys, "train", str(config), "--set", "steps=1", "--set", f"output_dir={tmp_path / 'run'}")
    assert found["report"] is None
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()


def test_a_real_interrupt_finishes_the_step_and_writes_a_checkpoint(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tracefp4.cli.main", "train", str(config), "--json"]
    command += ["--set", "steps=100000", "--set", f"output_dir={folder}"]
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_env(), start_new_session=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("step 0 ("):
                break
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does: to the whole group.
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert time.monotonic() - started < 60
    assert "stopping after this step" in err
    assert "Traceback" not in err
    done = json.loads(out)
    assert done["interrupted"] is True
    assert done["steps"] >= 1
    assert (folder / "checkpoints" / f"step-{done['steps']:06d}" / "manifest.json").is_file()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[-1]["step"] == done["steps"] - 1
    assert Path(done["report"]).is_file()


# measure, rollout, eval -----------------------------------------------------------------------------------------------


def test_measure_prints_what_the_design_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ["--prompts", "2", "--samples", "1", "--max-new-tokens", "3", "--device", "cpu"]
    output = tmp_path / "new" / "measure.json"
    found = _json(capsys, "measure", "tiny:qwen3_moe", "--plan", "r1-all+mid", *small, "--output", str(output))
    assert found.keys() == {"model", "spec", "numerics", "device", "engine", "tokens", "prompts", "rows", "sites"}
    assert [row["name"] for row in found["rows"]] == ["bf16_floor", "fp4_vs_bf16", "qat", "guided"]
    assert all(row.keys() >= ROW_KEYS for row in found["rows"])
    assert all(len(row["k3_ci"]) == 2 for row in found["rows"])
    assert found["sites"] and all(site.keys() >= SITE_KEYS for site in found["sites"])
    assert json.loads(output.read_text(encoding="utf-8")) == found


def test_measure_prints_a_table_for_people(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    small = ["--prompts", "2", "--samples", "1", "--max-new-tokens", "2", "--device", "cpu", "--task", str(config)]
    assert main.run(["measure", "tiny-moe", "--plan", "r1-all@nearest", *small]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny-moe, nvfp4-w4a4-kv4 (nvfp4-te) on cpu")
    assert [line.split()[0] for line in lines[3:]] == ["bf16_floor", "fp4_vs_bf16", "qat", "guided"]
    assert "nearest" in lines[-1]


def test_rollout_generates_and_weighs_its_guidance(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    some = ["rollout", "tiny:qwen3_moe", "--prompt", "1+1=", "--samples", "2", "--max-new-tokens", "3"]
    found = _json(capsys, *some, "--device", "cpu", "--guidance-dir", str(tmp_path / "frames"))
    assert [row["prompt"] for row in found["samples"]] == ["1+1=", "1+1="]
    assert all(1 <= row["tokens"] <= 3 and row["mean_logprob"] < 0 for row in found["samples"])
    weight = found["guidance"]
    assert weight["bytes"] == sum(row["guidance"]["bytes"] for row in found["samples"]) == sum(weight["parts"].values())
    assert found["sites"] == 8
    kept = [path for path in (tmp_path / "frames").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) >= weight["bytes"]
    assert main.run([*some, "--device", "cpu", "--plan", "none"]) == 0
    shown = capsys.readouterr().out
    assert "> 1+1=" in shown
    assert "guidance" not in shown


def test_rollout_profile_splits_the_time(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = ["rollout", str(trained), "--prompt", "1+1=", "--max-new-tokens", "3", "--device", "cpu", "--profile"]
    shares = _json(capsys, *some)["profile"]["shares"]
    assert sum(shares.values()) == pytest.approx(1.0) and all(share >= 0 for share in shares.values())
    assert shares["kv_guidance"] > 0 and shares["frames"] > 0
    assert shares["forward"] == max(shares.values())
    assert _json(capsys, *some[:-1])["profile"] is None


def test_rollout_of_a_spec_with_eight_bit_activations(capsys: pytest.CaptureFixture[str]) -> None:
    some = ["rollout", "tiny:qwen3_moe", "--prompt", "1+1=", "--max-new-tokens", "2", "--device", "cpu"]
    assert _json(capsys, *some, "--spec", "mxfp4-w4a8-kv4")["sites"] == 8


def test_quantize_of_a_run_and_its_evaluation(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "packed"
    some = [
        "quantize",
        str(trained),
        "--method",
        "hscale",
        "--output",
        str(folder),
        "--prompts",
        "4",
        "--device",
        "cpu",
    ]
    found = _json(capsys, *some)
    assert found["errors"]["weighted"] < found["errors"]["weighted_nearest"]
    assert found["calibration"]["prompts"] == 4
    evaluated = ["eval", str(folder), "--config", str(trained / "config.toml"), "--items", "4", "--samples", "1"]
    assert _json(capsys, *evaluated, "--device", "cpu")["spec"] == "nvfp4-w4a4-kv4"
    assert _json(capsys, *evaluated, "--spec", "bf16", "--device", "cpu")["spec"] == "bf16"
    assert main.run(some) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(("spec", "shown"), [(None, "nvfp4-w4a4-kv4"), ("bf16", "bf16")])
def test_eval_of_a_run(trained: Path, capsys: pytest.CaptureFixture[str], spec: str | None, shown: str) -> None:
    some = ["eval", str(trained), "--items", "4", "--samples", "2", "--k", "1", "--k", "2", "--device", "cpu"]
    found = _json(capsys, *some, *([] if spec is None else ["--spec", spec]))
    assert (found["spec"], found["task"], found["items"], found["samples"]) == (shown, "chain_sum", 4, 2)
    assert found["pass"].keys() == {"pass@1", "pass@2"}
    for row in [*found["pass"].values(), found["score"]]:
        assert 0 <= row["low"] <= row["estimate"] <= row["high"] <= 1


def test_eval_uses_the_weights_of_the_checkpoint(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tracefp4.evaluation.policy import load_policy
    from tracefp4.training import checkpoint

    _, loaded = load_policy(str(trained), None, (), "cpu")
    weights, _, _ = checkpoint.load(trained / "checkpoints" / "step-000002")
    assert all(bool((weights[name] == p).all()) for name, p in loaded.model.named_parameters())
    assert main.run(["eval", str(trained), "--items", "2", "--samples", "1", "--device", "cpu"]) == 0
    assert re.search(r"pass@1: \S+  \[\S+, \S+\]", capsys.readouterr().out)


# What a user gets wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "CONFIG", "--set", "optimiser.lr=1"], "did you mean 'optimizer'"),
        (["train", "CONFIG", "--set", "method=trase"], "did you mean 'trace'"),
        (["train", "CONFIG", "--set", "plan=r1-al"], "did you mean 'r1-all"),
        (["train", "CONFIG", "--set", "spec=nvfp4-w4a4-kv8"], "did you mean 'nvfp4-w4a4-kv4'"),
        (["train", "CONFIG", "--set", "policy=tiny-mo"], "did you mean 'tiny-moe'"),
        (["train", "CONFIG", "--set", "engine=embeded"], "did you mean 'embedded'"),
        (["train", "CONFIG", "--set", "task.name=chain_sums"], "did you mean 'chain_sum'"),
        (["train", "CONFIG", "--set", "device=cud"], "valid: auto, cpu, cuda, cuda:N"),
        (["train", "nowhere.toml"], "does not exist"),
        (["measure", "tiny:qwen3_mo"], "did you mean 'tiny:qwen3_moe'"),
        (["measure", "tiny-moe", "--plan", "r9-all"], "did you mean"),
        (["rollout", "tiny-moe"], "give --prompt TEXT"),
        (["rollout", "tiny-moe", "--prompt", "1", "--spec", "nvfp4"], "Unknown spec"),
        (["eval", "nowhere"], "give --config FILE"),
        (["eval", "RUN", "--k", "9"], "needs at least 9 samples"),
        (["eval", "RUN", "--set", "policy=tiny:qwen3_moe"], "is of another model"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    config: Path, trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    named = [{"CONFIG": str(config), "RUN": str(trained)}.get(word, word) for word in arguments]
    if arguments[:2] == ["train", "CONFIG"]:
        named += ["--set", f"output_dir={config.parent / 'never'}"]
    assert main.run(named) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (config.parent / "never").exists()


def _env() -> dict[str, str]:
    source = Path(main.__file__).parents[2]
    return {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
