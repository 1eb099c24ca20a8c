from fractions import Fraction

import pytest

from lit_grpo.rewards.math_answers.quantities import (
    MAX_EXPONENT,
    MAX_NUMBER_CHARACTERS,
    is_same_number,
    parse_number,
    with_plain_fractions,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1,234.50", Fraction(-2469, 2)),
        ("1 3/4", Fraction(7, 4)),
        ("-1 3/4", Fraction(-7, 4)),
        ("$.5", Fraction(1, 2)),
        ("1.234.567", 1234567),
        ("1.5e-3", Fraction(3, 2000)),
        (r"2\times 10^{3}", 2000),
        ("3 dozen", 36),
        ("2.5 million dollars", 2_500_000),
        (r"25 %", 25),
        (r"5\text{ cm}^2", 5),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"0.1\overline{6}", Fraction(1, 6)),
    ],
)
def test_a_number_is_exact_whatever_its_notation_and_unit(text, value):
    assert parse_number(text) == (value, False)


@pytest.mark.parametrize(("text", "value"), [("5 m", 5), ("25 s^2", 25), ("1.5 g", Fraction(3, 2))])
def test_a_letter_behind_a_number_may_be_a_variable_and_is_told(text, value):
    assert parse_number(text) == (value, True)


@pytest.mark.parametrize(
    "text", ["", "x", "5x", "5 or 6", "5 times", "1/2/3", "1,23", "3:4", "5/0", "$", "2 + 3"]
)
def test_what_is_no_single_number_has_no_value(text):
    assert parse_number(text) is None


def test_numbers_with_too_many_digits_are_left_to_the_worker():
    assert parse_number(f"1e{MAX_EXPONENT}") == (10**MAX_EXPONENT, False)
    assert parse_number(f"1e{MAX_EXPONENT + 1}") is None
    assert parse_number("1" * MAX_NUMBER_CHARACTERS) is not None
    assert parse_number("1" * (MAX_NUMBER_CHARACTERS + 1)) is None


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"\frac{9}{7}", "9/7"),
        (r"1\frac{3}{4}", "1 3/4"),
        (r"-\frac{3}{4}", "- 3/4"),
        (r"0.\overline{3}", "3/9"),
        (r"1.2\overline{34}", "1222/990"),  # (1234 - 12) / 990
        (r"\frac{x}{2}", r"\frac{x}{2}"),
        ("3/4  cups", "3/4 cups"),
    ],
)
def test_fractions_of_numbers_become_quotients(text, plain):
    assert with_plain_fractions(text) == plain


@pytest.mark.parametrize(
    ("gold", "answer", "is_same"),
    [
        (Fraction(1, 2), Fraction(2, 4), True),
        (Fraction(1, 3), Fraction("0.333333"), True),
        (Fraction(1, 3), Fraction("0.33333"), False),
        (Fraction("0.333333"), Fraction(1, 3), True),
        (Fraction("0.333333"), Fraction("0.3333333"), False),  # both end
        (Fraction(1, 3), Fraction(1000001, 3000000), False),  # neither ends
        (Fraction(1, 1100000), Fraction("0.000001"), False),  # near, but not for so small a number
    ],
)
def test_only_a_decimal_and_a_fraction_that_never_ends_may_differ(gold, answer, is_same):
    assert is_same_number(gold, answer) is is_same
