"""Answers are compared part by part; only single formulas go to computer algebra."""

import asyncio

import pytest

from lit_grpo.rewards.math_answers.answers import parse_answer
from lit_grpo.rewards.math_answers.equality import are_equal, formulas_of


class Algebra:
    """Computer algebra that knows a few equal formulas, and keeps what it was asked."""

    def __init__(self, *equal: tuple[str, str]):
        self.equal = equal
        self.asked: list[tuple[str, ...]] = []

    async def __call__(self, name: str, *texts: str) -> bool:
        self.asked.append((name, *texts))
        return texts in self.equal


def compare(gold: str, answer: str, *equal: tuple[str, str]) -> tuple[bool, list[tuple[str, ...]]]:
    """Return whether the answers are equal, and what computer algebra was asked for that."""
    algebra = Algebra(*equal)
    is_equal = asyncio.run(are_equal(parse_answer(gold), parse_answer(answer), algebra))
    return is_equal, algebra.asked


@pytest.mark.parametrize(
    ("gold", "answer", "is_equal"),
    [
        ("5", "5.0", True),
        ("5", "6", False),
        ("1, 2", "2, 1", True),
        ("1, 1, 2", "1, 2, 2", False),
        ("1, 2", "1, 2, 3", False),
        ("(1, 2)", "(1, 2)", True),
        ("(1, 2)", "(2, 1)", False),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        (r"\{1, 2\}", "(1, 2)", False),
        (r"\{1, 2\}", "2, 1", True),
        ("[1, 2]", "(1, 2)", False),
        ("(1,2), (3,4)", "(3,4), (1,2)", True),
        ("x = 5", "5", True),
        ("5", "x = 5", True),
        ("x = 5", "x = 6", False),
        ("x = 1, x = 2", "1, 2", True),
        ("x = 1, x = 2", "t = 1, t = 2", False),
        ("", "5", False),
    ],
)
def test_lists_and_values_of_variables_need_no_algebra_where_numbers_decide(gold, answer, is_equal):
    assert compare(gold, answer) == (is_equal, [])


def test_formulas_are_asked_for_as_they_are():
    pair = ("x+1", "1+x")
    assert compare(*pair, pair) == (True, [("is_equal", *pair)])
    assert compare(*pair) == (False, [("is_equal", *pair)])


def test_only_the_parts_that_are_no_numbers_are_asked_for():
    is_equal, asked = compare("(1, x+1)", "(1, 1+x)", ("x+1", "1+x"))
    assert is_equal
    assert asked == [("is_equal", "x+1", "1+x")]


def test_the_values_of_one_variable_are_compared_and_other_equations_as_a_whole():
    assert compare("y = x+1", "y = 1+x", ("x+1", "1+x"))[0]
    assert compare("2x = 4", "x+x = 4", ("2x=4", "x+x=4"))[0]
    assert not compare("2x = 4", "4", ("2x", "4"))[0]  # 4 is no value of 2x


def test_values_of_several_variables_may_have_any_order():
    assert compare("x = 5, y = 6", "y = 6, x = 5")[0]
    assert not compare("x = 5, y = 6", "x = 6, y = 5")[0]


def test_a_set_is_compared_by_what_is_in_it():
    assert compare(r"x \in (0,1)", "0<x<1", (" (0,1)", "0<x<1"))[0]
    assert compare(r"\{x|x>1\}", r"(1,\infty)", ("x>1", r"(1,\infty)"))[0]


def test_an_approximation_is_right_by_one_side_if_the_other_does_not_contradict_it():
    gold, answer = r"\sqrt{2}", r"\sqrt{2} \approx 1.414"
    is_equal, asked = compare(gold, answer, (r"\sqrt{2}", "1.414"))
    assert is_equal
    assert asked == [("is_near", r"\sqrt{2}", "1.414")]
    assert compare(gold, answer) == (False, [("is_near", r"\sqrt{2}", "1.414")])


@pytest.mark.parametrize(
    ("gold", "formulas"),
    [
        ("x+1", ["x+1"]),
        ("x = 2y", ["2y"]),
        ("2x = 4y", ["2x = 4y"]),
        ("(1, x+1)", ["1", "x+1"]),
        (r"\sqrt{2} \approx 1.4", [r"\sqrt{2}", "1.4"]),
    ],
)
def test_the_formulas_of_a_gold_answer_are_the_parts_that_must_be_readable(gold, formulas):
    assert [one.text for one in formulas_of(parse_answer(gold))] == formulas
