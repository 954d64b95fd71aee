"""Reward functions with the signatures that users bring."""

import numpy as np
import pytest

from tracefp4.errors import TaskError
from tracefp4.rl.tasks.rewards import RewardCall, adapt, load_reward

CALL = RewardCall("seven", "7", "what?", "src", {"index": 3})


def test_simple():
    def reward(completion, answer):
        return completion == "seven" and answer == "7"

    assert adapt(reward, "r")([CALL, RewardCall("no", "7")]) == [1.0, 0.0]
    assert adapt(lambda text, gold, strict=True: np.float32(0.5), "r")([CALL]) == [0.5]


def test_verl():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, solution_str, ground_truth, extra_info) == ("src", "seven", "7", {"index": 3})
        return {"score": 0.25, "acc": True}

    def short(solution_str, ground_truth):
        return float(solution_str == ground_truth)

    def open_ended(solution_str, ground_truth, **kwargs):
        return kwargs["extra_info"]["index"]

    assert adapt(compute_score, "r")([CALL]) == [0.25]
    assert adapt(short, "r")([CALL]) == [0.0]
    assert adapt(open_ended, "r")([CALL]) == [3.0]


def test_trl():
    def reward(prompts, completions, answer, **kwargs):
        assert kwargs["index"] == [3, None]
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def only_completions(completions, **kwargs):
        return [len(c) for c in completions]

    def conversational(prompts, completions):
        return [float(c[0]["content"] == p[-1]["content"]) for p, c in zip(prompts, completions, strict=True)]

    assert adapt(reward, "r")([CALL, RewardCall("7", "7", "p")]) == [0.0, 1.0]
    assert adapt(only_completions, "r")([CALL]) == [5.0]
    turn = RewardCall("echo", None, [{"role": "user", "content": "echo"}])
    assert adapt(conversational, "r")([turn]) == [1.0]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", [1.0]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TaskError, match="not a finite number"):
        adapt(lambda completion, answer: value, "mine")([CALL])


def test_a_trl_function_must_return_one_value_each():
    with pytest.raises(TaskError, match="2 values for 1 completions"):
        adapt(lambda prompts, completions: [1.0, 2.0], "mine")([CALL])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math.sqrt", "not of the form"),
        ("no_such_module_here:f", "cannot be imported"),
        ("math:no_such", "has no 'no_such'"),
        ("math:pi", "not a function"),
    ],
)
def test_bad_paths_are_named(path, message):
    with pytest.raises(TaskError, match=message):
        load_reward(path)


def test_unknown_signatures_are_named_with_those_accepted():
    with pytest.raises(TaskError, match=r"\(a, b, c\); accepted are \(completion, answer\)"):
        adapt(lambda a, b, c: 0.0, "mine")
    with pytest.raises(TaskError, match="accepted"):
        adapt(lambda a, b, *, needed: 0.0, "mine")


def test_errors_of_the_function_are_the_users_to_see():
    with pytest.raises(ZeroDivisionError):
        adapt(lambda completion, answer: 1 / 0, "mine")([CALL])
