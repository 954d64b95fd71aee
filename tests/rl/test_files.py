"""Tasks from files: columns, splits, rewards, and what a bad row says."""

import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from tracefp4.errors import ConfigError, TaskError
from tracefp4.rl.tasks.base import Message
from tracefp4.rl.tasks.files import FilesTask


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def simple(tmp_path, n=40, name="data.jsonl"):
    return jsonl(tmp_path / name, [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(n)])


def verl(i):
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is {i}+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train"},
    }


def test_jsonl_with_recognised_columns(tmp_path):
    task = FilesTask("sums", {"train": simple(tmp_path), "extract": "number", "reward": "number"})
    item = task.items("train", 1)[0]
    assert item.prompt.endswith("+1=")
    assert int(item.prompt[:-3]) + 1 == int(item.answer)
    assert task.score_all([item] * 4, [f"= {item.answer}", f"{item.answer}.0", "12345", "none"]) == [1, 1, 0, 0]
    assert task.score(item, item.target) == 1.0


def test_verl_parquet_as_it_is(tmp_path):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([verl(i) for i in range(30)]), path)
    task = FilesTask("", {"train": str(path), "extract": "hash"})
    item = task.items("train", 1)[0]
    assert item.prompt[0] == Message("system", "Be brief.")
    assert item.metadata["data_source"] == "openai/gsm8k"
    assert item.metadata["extra"]["index"] == int(item.answer) - 1
    assert item.metadata["extra"]["ability"] == "math"
    assert item.target == f"#### {item.answer}"
    assert task.score(item, item.target) == 1.0
    assert ", row " in item.id


def test_columns_by_name_and_path(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "no", "q": {"text": f"q{i}"}, "gold": {"v": i}} for i in range(40)])
    task = FilesTask("", {"train": path, "prompt_column": "q.text", "answer_column": "gold.v"})
    for item in task.items("train", 10):
        assert item.prompt == f"q{item.answer}"


def test_splits_are_disjoint_and_do_not_depend_on_the_seed(tmp_path):
    task = FilesTask("", {"train": simple(tmp_path, 200), "holdout": 0.2})
    train, held = ({i.prompt for i in task.items(s, 200)} for s in ("train", "eval"))
    assert not train & held
    assert len(train) + len(held) == 200
    assert {i.prompt for i in task.items("eval", 200, seed=5)} == held
    assert 20 <= len(held) <= 60


def test_training_goes_round_and_evaluation_does_not(tmp_path):
    files = {"train": simple(tmp_path, 10, "a.jsonl")}
    held = jsonl(tmp_path / "b.jsonl", [{"question": f"other {i}", "answer": "1"} for i in range(4)])
    task = FilesTask("", files | {"eval": held})
    drawn = Counter(i.prompt for i in task.items("train", 25, seed=1))
    assert len(drawn) == 10 and set(drawn.values()) <= {2, 3}
    assert len(task.items("eval", 100)) == 4
    assert task.items("eval", 100, start=3) == task.items("eval", 100)[3:]
    assert task.items("eval", 2, start=9) == []


def test_items_are_a_function_of_split_seed_and_position(tmp_path):
    task = FilesTask("", {"train": simple(tmp_path)})
    whole = task.items("train", 90, seed=(1, "s"))
    assert task.items("train", 90, seed=(1, "s")) == whole
    assert task.items("train", 30, seed=(1, "s"), start=25) == whole[25:55]
    assert task.items("train", 30, seed=(2, "s")) != whole[:30]


def test_overlapping_files_are_refused(tmp_path):
    path = simple(tmp_path)
    with pytest.raises(TaskError, match="line 1: the prompt of this evaluation row is in the training files too"):
        FilesTask("", {"train": path, "eval": path})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON in UTF-8"),
        ("[1]", "line 3: a list, not an object"),
        ('{"answer": "1"}', "line 3: column 'question' is missing"),
        ('{"question": "q"}', "line 3: column 'answer' is missing"),
        ('{"question": "", "answer": "1"}', "line 3: a prompt must be text or a list of turns, got ''"),
        ('{"question": 7, "answer": "1"}', "line 3: a prompt must be text"),
        ('{"question": [{"role": "user"}], "answer": "1"}', "line 3: a prompt's turn must be"),
        ('{"question": [{"role": "boss", "content": "x"}], "answer": "1"}', "line 3: a prompt's turn"),
        ('{"question": "q", "answer": null}', "line 3: the answer is empty"),
        ("[" * 100_000, "line 3: not JSON"),
        ("\xff\xfe", "line 3: not JSON in UTF-8"),
    ],
)
def test_bad_rows_are_named_by_file_and_row(tmp_path, line, message):
    good = json.dumps({"question": "q", "answer": "1"})
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f"{good}\n{good}\n{line}\n".encode("latin-1"))
    with pytest.raises(TaskError, match="rows.jsonl, ") as caught:
        FilesTask("", {"train": str(path)})
    assert message in str(caught.value)


def test_bad_files_are_named(tmp_path):
    for name, content, message in (
        ("a.parquet", b"PAR1 no", "cannot be read as parquet"),
        ("a.csv", b"", "neither .jsonl nor .parquet"),
        ("a.jsonl", b"", "has no rows"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TaskError, match=message):
            FilesTask("", {"train": str(tmp_path / name)})
    with pytest.raises(TaskError, match="does not exist"):
        FilesTask("", {"train": str(tmp_path / "none.jsonl")})
    path = jsonl(tmp_path / "b.jsonl", [{"text": "x", "answer": "1"}])
    with pytest.raises(TaskError, match=r"no prompt column among text, answer \(known: prompt, question"):
        FilesTask("", {"train": path})
    with pytest.raises(TaskError, match="no column 'txt' for the prompt"):
        FilesTask("", {"train": path, "prompt_column": "txt"})


def test_unknown_rewards_and_options_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="valid: exact, number, math"):
        FilesTask("", {"train": simple(tmp_path), "reward": "exakt"})
    with pytest.raises(ConfigError, match="did you mean 'train'"):
        FilesTask("", {"train": "x", "trian": "y"})


def test_math_reward(tmp_path):
    path = jsonl(tmp_path / "m.jsonl", [{"problem": f"p{i}", "solution": "\\frac{1}{2}"} for i in range(30)])
    task = FilesTask("math", {"train": path, "reward": "math", "extract": ["boxed", "number"], "workers": 1})
    try:
        items = task.items("train", 4)
        completions = ["so \\boxed{0.5}", "it is 2/4", "\\boxed{2}", "unknown"]
        assert task.score_all(items, completions) == [1.0, 1.0, 0.0, 0.0]
        assert task.counts["no_answer"] == 1
    finally:
        task.close()


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("7", "7.0", True),
        ("1,234", "1234", True),
        ("0.5", "1/2", True),
        ("$3", "3.", True),
        ("1/3", "0.3333", False),
        ("7", "1/0", False),
        ("blue", "blue", True),
        ("7", "9" * 400, False),
    ],
)
def test_number_reward(tmp_path, gold, answer, equal):
    path = jsonl(tmp_path / "n.jsonl", [{"prompt": f"p{i}", "answer": gold} for i in range(30)])
    task = FilesTask("", {"train": path, "reward": "number", "extract": "whole"})
    assert task.score(task.items("train", 1)[0], answer) == float(equal)


def test_reward_function_in_process_and_isolated(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'loop':\n"
        "        while True: pass\n"
        "    return {'score': 2.0 * (solution_str == ground_truth) - extra_info['index'] * 0, 'note': data_source}\n"
        "def broken(completion, answer):\n"
        "    raise RuntimeError('always')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = jsonl(tmp_path / "v.jsonl", [verl(i) for i in range(30)])
    options = {"train": path, "reward": "my_reward:compute_score", "workers": 1, "timeout": 1.0}
    task = FilesTask("", options)
    assert task.score_range is None
    item = task.items("train", 1)[0]
    assert item.target is None
    assert task.score_all([item, item], [item.answer, "no"]) == [2.0, 0.0]
    isolated = FilesTask("", options | {"isolate": True})
    try:
        assert isolated.score_all([item] * 3, [item.answer, "loop", item.answer]) == [2.0, 0.0, 2.0]
        assert isolated.counts["timeout"] == 1
    finally:
        isolated.close()
    broken = FilesTask("", options | {"isolate": True, "reward": "my_reward:broken"})
    try:
        with pytest.raises(TaskError, match="fails on every completion: RuntimeError: always"):
            broken.score(item, "x")
    finally:
        broken.close()
