"""A wrong answer is never the right one, and is the same each time."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.cli.precompute.perturb import with_answer, wrong_answers


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ("72", {"73", "71", "720", "144", "82", "-72", "27"}),
        ("-5", {"-4", "-6", "-50", "-10", "5"}),
        ("1,250", {"1251", "1249", "12500", "2500", "1260", "-1250", "2150", "1520", "1205"}),
        ("0.5", {"0.6", "0.4", "5.0", "1.0", "1.5", "-0.5"}),
        ("0", {"1", "-1", "10"}),
        ("3/4", {"3/5", "3/3", "3/40", "3/8", "3/14", "3/-4"}),
        ("$18 a day", {f"${n} a day" for n in ("19", "17", "180", "36", "28", "-18", "81")}),
        ("yes", set()),
    ],
)
def test_other_numbers_are_near_the_right_one(answer, wrong):
    assert set(wrong_answers([answer], [], "x")) == wrong


def test_words_are_replaced_by_those_of_other_rows():
    assert set(wrong_answers(["Paris"], ["Oslo", " paris", "Rome", "Oslo"], "x")) == {
        "Oslo",
        "Rome",
    }
    assert wrong_answers(["4"], ["Oslo"], "x")[-1] == "Oslo"


@pytest.mark.slow
@settings(max_examples=60)
@given(st.decimals(-(10**9), 10**9, places=2) | st.integers(-(10**12), 10**12), st.text())
def test_every_number_has_a_wrong_answer_of_another_value(number, seed):
    found = wrong_answers([str(number)], [], seed)
    assert found
    assert len(set(found)) == len(found)
    assert all(Decimal(one) != number for one in found)
    assert found == wrong_answers([str(number)], [], seed)


def test_the_seed_decides_the_order():
    orders = {tuple(wrong_answers(["72"], ["a", "b"], str(seed))) for seed in range(20)}
    assert len(orders) > 10


def test_a_solution_ends_with_the_wrong_answer():
    assert with_answer("4 and 4 is 8. #### 8", ["8"], "9") == "4 and 4 is 8. #### 9"
    assert with_answer("1250=1,250.0", ["1250"], "9") == "1250=9"
    assert with_answer("18: #### 8 (8.5)", ["8"], "9") == "18: #### 9 (8.5)"
    assert with_answer("It is Paris.", ["Paris"], "Rome") == "It is Rome."
    assert with_answer("eight", ["8"], "9") == "The answer is 9."
    assert with_answer("3 or 53, say 53.", ["3", "53"], "9") == "3 or 53, say 9."
    assert with_answer("Rome or Roma", ["Rome", "Roma"], "Oslo") == "Rome or Oslo"


def test_none_of_several_right_answers_is_a_wrong_one():
    right = ["3", "4", "Drei"]
    assert set(wrong_answers(right, ["4", "drei", "9"], "x")) == {"2", "30", "6", "13", "-3", "9"}
