"""No scorer that evaluates text gets anything but the tokens of a right answer."""

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS, create_dataset

from tracefp4.errors import ConfigError
from tracefp4.rl.tasks import guards
from tracefp4.rl.tasks.guards import GUARDS, REVIEWED, UNORDERED, admissible, check_generator

HOSTILE = [
    "__import__('os').system('touch /tmp/x')",
    "9**9**9**9",
    "9^9^9^9",
    "x**9**9",
    "x**(9**9)",
    "x**(9)**(9)",
    "exit()",
    "F'{exit()}'",
    "[F'{exit()}']",
    "().__class__.__bases__",
    "x.__class__",
    "[1,2].sort()",
    "[0]*999999999",
    "'a'*999999999",
    "lambda:0",
    "9!!!!",
    "1e999999999",
    "x(1)",
    "Integral(x, x)",
    "eval('1')",
    "\\pi**\\pi",
    "\ud800",
    "\x00",
    "9" * 5000,
    "(" * 5000,
]


@pytest.mark.parametrize("name", sorted(GUARDS))
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_does_not_pass(name, text):
    assert not admissible(name, text)


@pytest.mark.parametrize("name", sorted(GUARDS.keys() - {"puzzle24", "intermediate_integration"}))
def test_right_answers_pass(name):
    dataset = create_dataset(name, seed=3, size=20)
    for i in range(20):
        assert admissible(name, dataset[i]["answer"]), dataset[i]["answer"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("puzzle24", "(8 - 4)*6*1"),
        ("simple_integration", "-x**(1/2) + sin(2*x)/3 + C"),
        ("n_queens", "[['Q', '_'], ['_', 'Q']]"),
        ("spiral_matrix", "[1, -2, 3]"),
        ("coin_flip", "3/8"),
        ("gcd", "anything else"),
    ],
)
def test_other_spellings_pass(name, text):
    assert admissible(name, text)


@pytest.mark.parametrize("name", sorted(GUARDS))
@settings(max_examples=30, deadline=None)
@given(st.text(alphabet="0123456789.+-*/()[]{}'\"_ABFabefx, \n", max_size=60))
def test_nothing_that_passes_holds_an_attribute_or_a_call_by_name(name, text):
    if admissible(name, text):
        assert "{" not in text
        assert "__" not in text.replace("_ _", "").replace("__", "") or name in ("n_queens",)
        for i, letter in enumerate(text[:-1]):
            if letter == ".":
                assert not text[i + 1].isalpha()


def test_guards_are_linear():
    start = time.perf_counter()
    for name in GUARDS:
        for unit in ("A", "1,", "'a'", "x ", "* ", "**2", "sin", "[ ", "- "):
            admissible(name, unit * (4000 // len(unit)) + "!")
    assert time.perf_counter() - start < 3.0


def test_every_installed_generator_is_reviewed():
    for name, (dataset_class, _) in DATASETS.items():
        if name not in UNORDERED:
            check_generator(name, dataset_class, scored=True)
    listed = GUARDS.keys() | REVIEWED | UNORDERED
    assert listed <= DATASETS.keys()


def test_a_generator_that_evaluates_and_is_not_listed_is_refused(monkeypatch):
    monkeypatch.delitem(guards.GUARDS, "countdown")
    with pytest.raises(ConfigError, match=r"parse_expr.*scoring = 'exact'"):
        check_generator("countdown", DATASETS["countdown"][0], scored=True)
    check_generator("countdown", DATASETS["countdown"][0], scored=False)


def test_generators_that_iterate_over_sets_need_a_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        check_generator("ransom_note", DATASETS["ransom_note"][0], scored=True)
    monkeypatch.setitem(os.environ, "PYTHONHASHSEED", "0")
    check_generator("ransom_note", DATASETS["ransom_note"][0], scored=True)
