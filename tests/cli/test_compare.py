"""``tracefp4 compare``: what runs, what is kept when a run dies, what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tracefp4.cli import jobs, main
from tracefp4.cli.jobs import Job, Step, run_job, run_jobs
from tracefp4.report.results import load

FAKE = """
import json, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(next(w for w in words if w.startswith("output_dir=")).split("=", 1)[1])
method = next(w for w in words if w.startswith("method=")).split("=", 1)[1]
broken = pathlib.Path(__file__).with_name("broken")
if broken.exists() and method in broken.read_text().split():
    print("RuntimeError: out of memory", file=sys.stderr)
    sys.exit(1)
score = {"bf16": 0.75, "qat": 0.25, "trace": 0.75}[method]
with (folder / "metrics.jsonl").open("w") as stream:
    for step in range(3):
        stream.write(json.dumps({"step": step, "reward/mean": score, "mismatch_kl/mean": 0.1}) + "\\n")
with (folder / "evaluations.jsonl").open("w") as stream:
    for step, share in ((0, 0.0), (3, score)):
        stream.write(json.dumps({"step": step, "eval/scores": [float(i < 40 * share) for i in range(40)]}) + "\\n")
(folder / "summary.json").write_text(json.dumps({"warm_start": "w", "warm_start_seconds": 1000.0}))
(folder / "samples.jsonl").write_text(json.dumps({"step": 0, "prompt": "2+2=", "response": "4", "reward": 1.0}) + "\\n")
(folder / "checkpoints").mkdir(exist_ok=True)
print(json.dumps({"steps": 3, "interrupted": False}))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of runs go to a script that writes a run's records at once."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE, encoding="utf-8")
    real = jobs.subprocess.Popen

    def popen(words: list[str], **options: Any) -> Any:
        assert words[:2] == [sys.executable, "-m"]
        return real([sys.executable, str(script), *words[3:]], **options)

    monkeypatch.setattr(jobs.subprocess, "Popen", popen)
    return tmp_path


def _compare(config: Path, out: Path, *more: str) -> int:
    return main.run(["compare", str(config), "--out", str(out), "--no-probe", "--json", *more])


def test_every_arm_deploys_the_same_layers(fake: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that is chosen would choose them for its own arm alone."""
    assert _compare(config, fake / "c", "--set", "plan=auto:4096") == 0
    found = load(fake / "c" / "results.json")
    assert "spec=nvfp4-w4a4-kv4/b0" in found.runs["trace"][0].command
    assert "spec=" not in found.runs["qat"][0].command


def test_runs_tables_and_page(fake: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare(config, fake / "c", "--seeds", "2") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["done"] == 6 and shown["failed"] == []
    assert any("qat differs from bf16: -50.0 points" in line for line in shown["verdict"])
    names = {path.name for path in (fake / "c").iterdir()}
    assert names >= {"config.toml", "results.json", "index.html", "tables.md", "main.csv", "fig8.png", "runs"}
    found = load(fake / "c" / "results.json")
    assert [run.seed for run in found.runs["trace"]] == [0, 1]
    assert {run.seconds for run in found.runs["trace"]} == {0}, "the shared warm start is no part of a run"
    command = found.runs["qat"][1].command
    assert command.startswith(f"tracefp4 train {config} --set method=qat --set seed=1 --set output_dir=")
    assert not list((fake / "c").rglob("checkpoints")), "weights of finished runs are removed"
    assert _compare(config, fake / "c", "--seeds", "2", "--against", "qat") == 0
    assert "difference to qat" in (fake / "c" / "tables.md").read_text(encoding="utf-8")


def test_runs_side_by_side_are_dealt_out_to_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until all have begun, so one after the other they would never end."""
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "(here / sys.argv[1]).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "limit = time.monotonic() + 20\n"
        "while len(list(here.glob('run-*'))) < 4 and time.monotonic() < limit:\n"
        "    time.sleep(0.01)\n"
        "sys.exit(len(list(here.glob('run-*'))) < 4)\n"
    )
    real = jobs.subprocess.Popen
    monkeypatch.setattr(
        jobs.subprocess, "Popen", lambda words, **options: real([sys.executable, str(script), words[3]], **options)
    )
    made = [Job("arm", i, tmp_path / f"folder-{i}", [f"run-{i}"]) for i in range(4)]
    assert run_jobs(made, lambda text: None, 4, ["2", "5"]) == []
    assert sorted(path.read_text() for path in tmp_path.glob("run-*")) == ["2", "2", "5", "5"]


def test_runs_from_elsewhere_fill_in_what_is_missing(
    fake: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _compare(config, fake / "there", "--only", "qat") == 0
    assert _compare(config, fake / "here", "--only", "bf16", "--only", "trace") == 0
    capsys.readouterr()
    elsewhere = str(fake / "there" / "results.json")
    assert _compare(config, fake / "here", "--no-run", "--also", elsewhere) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["done"] == 3
    assert load(fake / "here" / "results.json").runs["qat"][0].status == "done"
    assert _compare(config, fake / "here", "--no-run", "--also", str(fake / "nowhere.json")) == 2


def test_the_arm_of_the_configuration_is_probed_whatever_the_order_of_tables(fake: Path, config: Path) -> None:
    words = ["compare", str(config), "--out", str(fake / "c"), "--tables", "t4,main", "--methods", "bf16,trace"]
    assert main.run([*words, "--json"]) == 1, "what measures needs a model, which these runs do not leave"
    runs = load(fake / "c" / "results.json").runs
    kept = [name for name, (run,) in runs.items() if "train.save_final=true" in run.command]
    assert kept == ["trace"] and [*runs].index("trace@mxfp4-w4a8-kv4") < [*runs].index("trace")


def test_a_run_that_dies_loses_nothing_but_itself(fake: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake / "broken").write_text("qat")
    assert _compare(config, fake / "c") == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["done"], shown["failed"]) == (2, ["qat, seed 0"])
    assert "out of memory" in (fake / "c" / "index.html").read_text(encoding="utf-8")
    stamps = {p: p.stat().st_mtime_ns for p in (fake / "c").rglob("metrics.jsonl")}
    (fake / "broken").unlink()
    assert _compare(config, fake / "c") == 0
    assert json.loads(capsys.readouterr().out)["done"] == 3
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in stamps.items()), "finished runs are not repeated"


def test_runs_may_be_made_apart_and_shown_together(
    fake: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _compare(config, fake / "c", "--only", "bf16", "--only", "trace/0") == 0
    assert json.loads(capsys.readouterr().out)["done"] == 2
    assert _compare(config, fake / "c", "--no-run") == 0
    assert json.loads(capsys.readouterr().out)["done"] == 2
    assert "qat: not run yet with seed 0." in (fake / "c" / "index.html").read_text(encoding="utf-8")
    assert _compare(config, fake / "d", "--no-run") == 0
    assert json.loads(capsys.readouterr().out)["done"] == 0


@pytest.mark.parametrize(
    ("settings", "checked"), [([], True), (["engine=sglang"], False), (["train.lag=1", "train.guided_lag=1"], False)]
)
def test_plans_that_training_would_refuse_are_not_among_the_usual_ones(
    fake: Path, config: Path, settings: list[str], checked: bool
) -> None:
    overrides = [word for item in ["plan=r2-all", *settings] for word in ("--set", item)]
    assert _compare(config, fake / "c", "--tables", "t5", "--only", "bf16", *overrides) == 0
    plans = [arm.plan for arm in load(fake / "c" / "results.json").arms][1:]
    assert plans[0] == ("r2-all/s8" if settings else "r2-all/s3") and "r1-all+mid/s8" in plans
    assert ("c1-all+mid/s2" in plans) == checked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "bf16,qatt"], "did you mean 'qat'"),
        (["--tables", "t8"], "unknown table 't8'"),
        (["--seeds", "x"], "neither a number of seeds"),
        (["--seeds", "0"], "positive number"),
        (["--seeds", "1,1"], "different seeds"),
        (["--only", "qarl"], "names no arm of this comparison"),
        (["--against", "qta"], "did you mean 'qat'"),
        (["--set", "eval.items=0"], "needs held-out items"),
        (["--arm", "qat:method=qat"], "two arms of one name"),
        (["--arm", "x:method=trace,plan=none"], "use method 'qat'"),
        (["--methods", "trace", "--set", "spec=nvfp4-w4a44"], "did you mean 'nvfp4-w4a4'"),
    ],
)
def test_what_is_refused_before_anything_runs(
    fake: Path, config: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert _compare(config, fake / "c", *options) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]
    assert not (fake / "c" / "runs").exists()


def test_a_folder_of_another_configuration_is_refused(
    fake: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _compare(config, fake / "c", "--methods", "bf16") == 0
    assert _compare(config, fake / "c", "--set", "steps=7") == 2
    assert "another configuration" in capsys.readouterr().out


def test_steps_after_training_are_repeated_alone(fake: Path) -> None:
    folder = fake / "run"
    broken = Step(["x", f"output_dir={folder}", "method=none"], folder / "probe" / "p.json", capture=True)
    job = Job("a", 0, folder, ["train", f"output_dir={folder}", "method=qat"], lambda: [broken])
    said: list[str] = []
    assert not run_job(job, said.append)
    assert (folder / "checkpoints").is_dir(), "weights stay while something needs them"
    assert any("x failed" in line for line in said)
    words, target = [f"output_dir={folder}", "method=qat"], folder / "probe" / "p.json"
    job.after = lambda: [Step(words, target, capture=True, title="probe")]
    said.clear()
    assert run_job(job, said.append)
    assert said == ["a, seed 0: probe"]
    assert json.loads((folder / "probe" / "p.json").read_text())["steps"] == 3


@pytest.mark.slow
def test_a_real_comparison_with_probe_and_post_hoc_quantization(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = ["compare", str(config), "--tables", "t7", "--out", str(tmp_path / "c"), "--json"]
    assert main.run(some) == 0
    assert json.loads(capsys.readouterr().out)["done"] == 3
    found = load(tmp_path / "c" / "results.json")
    assert len(found.runs["bf16"][0].posthoc) == 5
    assert found.runs["trace"][0].measure is not None and found.runs["trace"][0].profile is not None
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {"fig6.png", "fig10.png", "t7.csv"} <= names
