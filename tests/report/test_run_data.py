"""Reading run folders: series, intervals, and what is said about odd files."""

import json

import pytest

from tracefp4.errors import ConfigError
from tracefp4.report.run_data import read_run


def lines_of(folder, *rows):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_series_has_only_the_steps_that_have_the_metric(write_run):
    run = read_run(write_run(steps=11))
    assert run.series("reward/mean").steps == list(range(11))
    assert run.series("mismatch_kl_unguided/mean").steps == [0, 5, 10]
    assert not run.series("never/recorded")
    assert run.evaluations() == ["eval/chain_sum/pass@1"]
    assert [step for step, _, _ in run.intervals("eval/chain_sum/pass@1")] == [0, 5, 10]
    assert run.setting("task.name") == "chain_sum"
    assert run.setting("task.missing", "x") == "x"
    assert run.notes == []


def test_lines_of_one_step_are_merged_and_a_repeat_is_noted(tmp_path):
    folder = lines_of(
        tmp_path / "r",
        {"step": 0, "time": 1, "eval/t/pass@1": 0.1},
        {"step": 0, "time": 2, "reward/mean": 0.5},
        {"step": 1, "time": 3, "reward/mean": 0.6},
        {"step": 1, "time": 9, "reward/mean": 0.7},
    )
    run = read_run(folder)
    assert run.series("reward/mean").values == [0.5, 0.7]
    assert run.series("eval/t/pass@1").values == [0.1]
    assert run.notes == ["1 steps were recorded more than once; the later values count.", "config.toml is missing."]


def test_values_that_are_not_finite_are_left_out_and_noted(tmp_path):
    run = read_run(lines_of(tmp_path / "r", {"step": 0, "reward/mean": None}, {"step": 1, "reward/mean": 0.5}))
    assert run.series("reward/mean").steps == [1]
    assert "1 metric values were not finite" in run.notes[0]


def test_line_cut_off_by_a_crash_is_left_out_and_noted(write_run):
    folder = write_run(steps=4)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text()[:-30])
    run = read_run(folder)
    assert run.series("reward/mean").steps == [0, 1, 2]
    assert run.notes == ["The last line of metrics.jsonl is incomplete and is left out."]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"step": 0}\nnot json\n{"step": 1}\n', "line 2 is not JSON"),
        ('{"step": "0"}\n', "line 1 is not an object with an integer 'step'"),
        ("[1]\n", "line 1 is not an object"),
        ("", "no complete line"),
    ],
)
def test_malformed_metrics_are_refused_by_line(tmp_path, text, expected):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        read_run(tmp_path)


def test_wrong_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_run(tmp_path / "none")
    with pytest.raises(ConfigError, match="no metrics.jsonl"):
        read_run(tmp_path)


@pytest.mark.parametrize(("name", "text"), [("config.toml", "a = = 1"), ("summary.json", "{"), ("summary.json", "[]")])
def test_malformed_companions_are_refused(write_run, name, text):
    folder = write_run(steps=3)
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_run(folder)
