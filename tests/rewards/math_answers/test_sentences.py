import pytest

from lit_grpo.rewards.math_answers.sentences import (
    answer_in_lines,
    answer_in_sentence,
    has_prose,
    last_answer,
)


def text_of(answer) -> str | None:
    return None if answer is None else answer.text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("18", "18"),
        ("18 dollars.", "18 dollars"),
        ("therefore 18", "18"),
        ("about 18 eggs", "18 eggs"),
        ("18 because 9 + 9 = 18", "18"),
        ("18. Then 20 are left", "18"),
        ("the value of x is 18", "18"),
        ("9 + 9 = 18 eggs left", "18 eggs left"),
        ("**18** dollars", "18 dollars"),
        ("18 (eggs)", "18"),
        ("eighteen (18)", "18"),
        ("(Answer: 18)", "18"),
        (r"$\sqrt{3}$ times the side of it", r"\sqrt{3}"),
        ("that all of them have 5 apples", "5"),
        ("Paris", "paris"),
    ],
)
def test_the_answer_is_found_in_the_sentence_around_it(text, answer):
    assert text_of(answer_in_sentence(text)) == answer


@pytest.mark.parametrize("text", ["", "not known to anybody here", "..."])
def test_a_sentence_without_an_answer_has_none(text):
    assert answer_in_sentence(text) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("$$\n18\n$$", "18"),
        (r"\[ x = 3 \] as shown", "x = 3"),
        ("$$\n18", "18"),
        ("x = 5\ny = 6\nThese are all.", "x = 5, y = 6"),
        ("x = 5\n\n$y = 6$.", "x = 5, y = 6"),
    ],
)
def test_a_text_may_start_with_a_display_or_with_equations(text, answer):
    assert text_of(answer_in_lines(text)) == answer


@pytest.mark.parametrize("text", ["18", "x = 5", "x = 5\nx = 6", "So:\nx = 5\ny = 6", ""])
def test_anything_else_is_left_to_the_first_line(text):
    assert answer_in_lines(text) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5 + 3 = 8 apples", "8"),
        ("She has **5** of the 7.", "5"),
        ("We get $x^2$, and then 3 more", "3"),
        ("So it is $\\sqrt{3}$.", r"\sqrt{3}"),
        ("first\n\\sqrt{3}", r"\sqrt{3}"),
        ("there are 18\nor so", "18"),
        ("They have 24 <<48/2=24>> clips", "24"),
        ("so\nx = 5\ny = 6", "y = 6, x = 5"),
        ("below zero: -5", "-5"),
        ("pages 3-5", None),
        ("12 + 22", None),  # a calculation, not its result
        ("The result is 12 - 5", None),
        ("1/2 + 1/3", None),
        ("x = 5\nso 2 × 3", None),
        ("7 = 3 + 4", "7"),
        ("The answer is 7, from 3 + 4", "7"),
        ("from 20% * 50 it is 10", "10"),
        ("3x + 2", "3x + 2"),
        ("first\nSo it is 3*x+2.", "3*x+2"),
        ("**x² + 1**", "x^2 + 1"),
        ("y = 2x - 3", "2x - 3"),
        ("We get 3 + 4i", "3 + 4i"),
        ("It goes at 10 m/s", "10"),
        ("x = 3, y = 4", "x = 3, y = 4"),
        ("it is not 5", None),
        ("nobody knows", None),
    ],
)
def test_without_a_mark_the_last_formula_or_number_is_the_answer(text, answer):
    assert text_of(last_answer(text)) == answer


@pytest.mark.parametrize(
    ("text", "is_prose"),
    [
        ("two words", True),
        ("so x = 5", False),
        (r"\text{two words} + 5", False),
        (r"\sin \cos", False),
        ("5 eggs", False),
        ("Paris", False),
    ],
)
def test_prose_has_two_words_in_a_row_outside_of_formulas(text, is_prose):
    assert has_prose(text) is is_prose
