"""pass@k against enumeration, and its intervals."""

from itertools import combinations

import pytest

from tracefp4.errors import TaskError
from tracefp4.evaluation.passk import evaluate_passk, pass_at_k


@pytest.mark.parametrize("n", [1, 4, 7])
def test_equals_the_share_of_subsets_with_a_right_sample(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            expected = sum(any(i < c for i in s) for s in subsets) / len(subsets)
            assert pass_at_k([n], [c], k)[0] == pytest.approx(expected)


def test_large_counts_do_not_overflow():
    assert pass_at_k([10_000], [1], 5000)[0] == pytest.approx(0.5)


def test_one_sample_a_problem_uses_wilson():
    (result,) = evaluate_passk([[True]] * 8 + [[False]] * 2)
    assert (result.method, result.problems, result.samples) == ("wilson", 10, 1)
    assert (result.estimate, result.low) == (0.8, pytest.approx(0.4902, abs=1e-4))


def test_more_samples_use_the_bootstrap_over_problems():
    outcomes = [[True] * 4, [False] * 4, [True, False, False, False], [False, True, True, False]] * 5
    one, two = evaluate_passk(outcomes, ks=(1, 2))
    assert one.estimate == pytest.approx((1 + 0 + 0.25 + 0.5) / 4)
    assert two.estimate == pytest.approx((1 + 0 + 0.5 + 5 / 6) / 4)
    assert two.low < two.estimate < two.high
    assert two.to_dict()["k"] == 2
    assert evaluate_passk(outcomes, ks=(2,)) == [two]


def test_problems_may_differ_in_samples():
    (result,) = evaluate_passk([[True, False], [True, False, False, False]])
    assert result.estimate == pytest.approx((0.5 + 0.25) / 2)
    assert result.samples == 2


@pytest.mark.parametrize(
    "call", [lambda: pass_at_k([4], [2], 5), lambda: pass_at_k([4], [5], 1), lambda: pass_at_k([], [], 1)]
)
def test_impossible_requests_are_refused(call):
    with pytest.raises(TaskError):
        call()
