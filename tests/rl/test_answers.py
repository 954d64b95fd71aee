"""Finding the answer in a completion, and templates."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.errors import ConfigError
from tracefp4.rl.tasks.answers import RULES, check_rules, extract, wrap
from tracefp4.rl.tasks.templates import render


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("tag", "so <answer> 7 </answer>", "7"),
        ("tag", "<answer>1</answer> no, <answer>2</answer>.", "2"),
        ("tag", "<answer>a\nb</answer>", "a\nb"),
        ("tag", "<answer>7", None),
        ("tag", "</answer><answer>", None),
        ("boxed", "\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("boxed", "\\boxed{1", None),
        ("hash", "steps\n#### 42\nmore", "42"),
        ("hash", "####", None),
        ("number", "3 and -4.5.", "-4.5"),
        ("number", "3-4", "4"),
        ("number", "x = 1,234,567", "1,234,567"),
        ("number", "is 2/3!", "2/3"),
        ("number", "none", None),
        ("last_line", "a\n\n b \n\n", "b"),
        ("last_line", " \n", None),
        ("whole", " a b ", "a b"),
        ("whole", "", None),
    ],
)
def test_rules(rule, text, answer):
    assert extract(text, (rule,)) == answer


def test_rules_are_tried_in_order():
    assert extract("it is 5", ("tag", "number")) == "5"
    assert extract("<answer>6</answer> not 5", ("tag", "number")) == "6"


@pytest.mark.parametrize("rule", RULES)
@given(st.sampled_from(["7", "-12", "2/3", "1,234.5"]))
def test_what_is_written_is_found_again(rule, answer):
    assert extract(wrap(answer, (rule,)), (rule,)) == answer


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "unit", ["<answer>", "</answer>", "\\boxed{", "{", "}", "#### ", "1,", "1/", "-", "\n", "\ud800"]
)
def test_rules_are_linear(rule, unit):
    start = time.perf_counter()
    extract(unit * (200_000 // len(unit)), (rule,))
    assert time.perf_counter() - start < 1.0


def test_unknown_rules_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'boxed'"):
        check_rules(["tag", "boxd"])
    with pytest.raises(ConfigError, match="at least one"):
        check_rules([])


def test_templates():
    fields = {"question": "Q?", "numbers": [3, 1, 2], "grid": [[1, 2], [3, 4]]}
    assert render("{question} {{x}} {numbers}\n{grid}=", fields, "here") == "Q? {x} 3,1,2\n1,2\n3,4="
    assert render("{question}", {"question": "{numbers}"}, "here") == "{numbers}"
    with pytest.raises(ConfigError, match=r"here: template field \{number\} does not exist \(did you mean 'numbers'"):
        render("{number}", fields, "here")
    with pytest.raises(ConfigError, match="does not exist"):
        render("{question.__class__}", fields, "here")
    with pytest.raises(ConfigError, match="single '{'"):
        render("{", fields, "here")
