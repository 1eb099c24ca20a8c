"""The comparison of single formulas by computer algebra, here in this process."""

import logging

import pytest


@pytest.fixture(scope="module")
def worker():
    """Import the functions, which turn logging off in the process that they are made for."""
    from lit_grpo.rewards.math_answers import worker

    logging.disable(logging.NOTSET)
    return worker


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\sqrt{2}", "1.414214"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\sin^2 x + \cos^2 x", "1"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        ("5!", "120"),
        ("x+y=3", "2x+2y=6"),
        ("x>3", "3<x"),
        (r"\frac{1}{2^{99}}", "2^{-99}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        ("f(x)=x+1", "f(x)=1+x"),
        ("i^2", "-1"),
    ],
)
def test_equal_formulas_are_equal(worker, gold, answer):
    assert worker.is_equal(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\sqrt{2}", "1.41"),
        ("x^2+1", "x^2+2"),
        ("x", "y"),
        ("x>3", r"x \ge 3"),
        ("x+y=3", "1=1"),
        (r"\frac{1}{2^{99}}", "2^{-98}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        ("2^{1000}", "9^{9^{9^9}}"),
        ("1", r"\frac{1}{0}"),
        ("1", r"\frac{}{"),
    ],
)
def test_other_formulas_are_not(worker, gold, answer):
    assert not worker.is_equal(gold, answer)


def test_a_gold_answer_that_cannot_be_read_is_an_error(worker):
    with pytest.raises(ValueError, match="is not readable"):
        worker.is_equal(r"\frac{", "1")


@pytest.mark.parametrize(
    ("exact", "decimal", "is_near"),
    [
        (r"\sqrt{2}", "1.41", True),
        (r"\sqrt{2}", "1.42", False),
        (r"\frac{2}{3}", "0.67", True),  # rounded
        (r"\frac{2}{3}", "0.66", True),  # cut off
        (r"\frac{2}{3}", "0.68", False),
        (r"-\frac{2}{3}", "-0.67", True),
        (r"\frac{2}{3}", "-0.67", False),
        ("1234", "1200", True),
        ("1234", "1300", False),
        ("x", "1.4", False),
    ],
)
def test_a_decimal_is_near_if_it_is_rounded_or_cut_off(worker, exact, decimal, is_near):
    assert worker.is_near(exact, decimal) is is_near


@pytest.mark.parametrize("formula", ["x+1", r"\sqrt{2}", "2^{10}", "x=5", r"\{1,2\}"])
def test_formulas_are_readable(worker, formula):
    assert worker.is_readable(formula)


@pytest.mark.parametrize("formula", [r"\frac{", r"\frac{1}{0}", "[[["])
def test_what_is_no_formula_or_has_no_value_is_not_readable(worker, formula):
    assert not worker.is_readable(formula)
