"""Procedural tasks: the same items anywhere, splits that share nothing, and marks nobody can fake."""

import subprocess
import sys
from pathlib import Path

import pytest

from tracefp4.config import TaskConfig
from tracefp4.errors import ConfigError
from tracefp4.rl.tasks import make_task
from tracefp4.rl.tasks.reasoning_gym import ReasoningGymTask

SUMS = {
    "config": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "template": "{expression}=",
    "extract": "last_line",
}


@pytest.fixture(scope="module")
def sums():
    return ReasoningGymTask("chain_sum", SUMS)


def test_prompts_follow_the_template(sums):
    for item in sums.items("train", 8):
        assert item.prompt.endswith("=") and len(item.prompt) < 20
        assert eval(item.prompt[:-1]) == int(item.answer) == int(item.target)


def test_items_are_a_function_of_split_seed_and_position(sums):
    again = ReasoningGymTask("chain_sum", SUMS)
    assert again.items("train", 20, seed=(3, "step", 7)) == sums.items("train", 20, seed=(3, "step", 7))
    assert sums.items("train", 5, seed=1, start=15) == sums.items("train", 20, seed=1)[15:]
    assert sums.items("train", 20, seed=1) != sums.items("train", 20, seed=2)
    assert len({item.id for item in sums.items("train", 200)}) == 200


def test_items_are_the_same_in_another_process(sums):
    code = (
        "from tracefp4.rl.tasks.reasoning_gym import ReasoningGymTask\n"
        f"task = ReasoningGymTask('chain_sum', {SUMS!r})\n"
        "print([i.prompt for i in task.items('eval', 5, seed=(1, 'a'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_env())
    assert done.stdout.strip() == str([i.prompt for i in sums.items("eval", 5, seed=(1, "a"))]), done.stderr


def test_splits_share_no_problem_even_in_a_small_space():
    # One-digit sums of two terms: some 160 problems, all of which 600 draws would meet.
    task = ReasoningGymTask("chain_sum", SUMS | {"config": SUMS["config"] | {"max_terms": 2}})
    train = {item.prompt for item in task.items("train", 600)}
    held = {item.prompt for item in task.items("eval", 100)}
    assert len(train) > 100 and len(held) > 5
    assert not train & held


def test_seeds_alone_do_not_separate_a_small_space():
    task = ReasoningGymTask("chain_sum", SUMS | {"holdout": 0.0, "config": SUMS["config"] | {"max_terms": 2}})
    ids = [{item.id for item in task.items(split, 300)} for split in ("train", "eval")]
    assert not ids[0] & ids[1]
    assert {i.prompt for i in task.items("train", 300)} & {i.prompt for i in task.items("eval", 300)}


def test_strict_marks_are_all_or_nothing():
    task = ReasoningGymTask("spell_backward", {"template": "{word}>", "extract": "last_line"})
    (item,) = task.items("train", 1)
    wrong = item.answer[:-1] + ("a" if item.answer[-1] != "a" else "b")
    completions = [item.answer, wrong, item.answer + "zz", ""]
    assert task.score_all([item] * 4, completions) == [1.0, 0.0, 0.0, 0.0]
    assert task.counts["no_answer"] == 1


def test_strict_is_not_fooled_by_credit_that_adds_up_to_almost_1():
    # The scorer adds 1/6 six times for a right answer with a tail, and takes 0.2 off only if the sum is exactly 1.
    task = ReasoningGymTask(
        "spell_backward", {"config": {"min_word_len": 6, "max_word_len": 6}, "extract": "last_line"}
    )
    (item,) = task.items("train", 1)
    assert task.score(item, item.answer + "!!!") == 0.0


def test_lenient_keeps_partial_credit():
    task = ReasoningGymTask("spell_backward", {"extract": "last_line", "scoring": "lenient"})
    (item,) = task.items("train", 1)
    assert 0.0 < task.score(item, item.answer[:-1] + "#") < 1.0


def test_exact_needs_no_scorer():
    task = ReasoningGymTask("coin_flip", {"scoring": "exact", "extract": "whole"})
    (item,) = task.items("train", 1)
    assert (task.score(item, item.answer), task.score(item, "0")) == (1.0, 0.0)


def test_format_reward_is_a_share_of_the_whole():
    task = ReasoningGymTask("chain_sum", {"extract": ["tag", "number"], "format_reward": 0.2})
    (item,) = task.items("train", 1)
    a = item.answer
    completions = [f"<answer>{a}</answer>", "<answer>x</answer>", f"it is {a}", "no"]
    assert task.score_all([item] * 4, completions) == pytest.approx([1.0, 0.2, 0.8, 0.0])


@pytest.mark.parametrize("name", ["coin_flip", "game_of_life_halting"])
def test_scorers_that_nonsense_satisfies_are_refused(name):
    with pytest.raises(ConfigError, match=r"full marks to the answer '0'.*scoring = 'exact'"):
        ReasoningGymTask(name, {})


def test_problems_that_fail_their_own_scorer_are_not_drawn():
    task = ReasoningGymTask("gsm_symbolic", {"extract": "whole"})  # its scorer loses the sign of a negative answer
    items = task.items("eval", 40)
    assert task.score_all(items, [item.target for item in items]) == [1.0] * 40


def test_several_generators_by_weight():
    task = ReasoningGymTask(
        "mix",
        {
            "generators": [
                {"name": "chain_sum", "weight": 3, "config": SUMS["config"], "template": "{expression}="},
                {"name": "spell_backward", "template": "{word}>", "target": " {answer}"},
            ],
            "extract": "last_line",
        },
    )
    items = task.items("train", 200)
    share = sum(item.metadata["generator"] == "chain_sum" for item in items) / 200
    assert 0.65 < share < 0.85
    assert task.score_all(items, [item.target for item in items]) == [1.0] * 200
    assert any(item.target.startswith(" ") for item in items)


def test_generators_that_hold_a_list_of_problems_never_run_out():
    task = ReasoningGymTask("list_functions", {"extract": "whole"})
    assert len({item.prompt for item in task.items("train", 20)}) == 20


HOSTILE = ["9**9**9**9", "__import__('os')", "(9*" * 60 + "9" + ")" * 60, "1" * 1_000_000, "\ud800", "+", "24/0"]


def test_scorers_of_expressions_run_in_a_worker():
    task = ReasoningGymTask("countdown", {"config": {"min_numbers": 3, "max_numbers": 3}, "extract": "whole"})
    try:
        items = task.items("train", 3)
        assert task.score_all(items, [item.answer for item in items]) == [1.0] * 3
        assert task.score_all([items[0]] * len(HOSTILE), HOSTILE) == [0.0] * len(HOSTILE)
        assert task.counts["refused"] >= 4
        assert task.score(items[1], items[1].answer) == 1.0
    finally:
        task.close()


@pytest.mark.parametrize(
    "name", ["spiral_matrix", "string_insertion", "number_sorting", "prime_factorization", "chain_sum"]
)
def test_hostile_answers_score_0(name, tmp_path):
    canary = tmp_path / "canary"
    task = ReasoningGymTask(name, {"extract": "whole"})
    (item,) = task.items("train", 1)
    attacks = [*HOSTILE, f"[open({str(canary)!r}, 'w')]", "[" * 3000, "1e999999"]
    assert task.score_all([item] * len(attacks), attacks) == [0.0] * len(attacks)
    assert not canary.exists()
    assert task.score(item, item.answer) == 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("composite", {}, "unknown reasoning-gym generator"),
        ("chain_sum", {"config": {"min_term": 2}}, "no parameter 'min_term' .did you mean 'min_terms'"),
        ("chain_sum", {"config": {"seed": 2}}, "no parameter 'seed'"),
        ("chain_sum", {"config": {"min_terms": 9}}, "its parameters"),
        ("chain_sum", {"tmplate": ""}, "unknown key 'task.options.tmplate' .did you mean 'template'"),
        ("chain_sum", {"template": "{expresion}"}, "did you mean 'expression'"),
        ("chain_sum", {"extract": "tags"}, "did you mean 'tag'"),
        ("chain_sum", {"scoring": "loose"}, "task.options.scoring"),
        ("chain_sum", {"target": "{answer}"}, "no answer is found in the target"),
        ("chain_sum", {"prompt": {"stile": "chat"}}, "prompt.stile"),
        ("", {"generators": [{"name": "gcd", "wieght": 2}]}, "did you mean 'weight'"),
        ("", {"generators": [{"name": "gcd", "weight": 0}]}, "weights are positive"),
        ("", {"generators": [{"name": "gcd"}, {"name": "gcd"}]}, "twice"),
    ],
)
def test_mistakes_are_named(name, options, message):
    with pytest.raises(ConfigError, match=message):
        ReasoningGymTask(name, options)


def test_make_task_reads_the_config():
    task = make_task(TaskConfig(kind="reasoning_gym", name="chain_sum", options=SUMS))
    assert (task.name, task.score_range) == ("chain_sum", (0.0, 1.0))
    task.close()


def _env():
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
