import pytest

from lit_grpo.rewards.math_answers.choices import choice_in, choice_of


@pytest.mark.parametrize(
    ("line", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("[B] Paris", "B"),
        ("B) Paris", "B"),
        ("B. Paris", "B"),
        ("B: Paris", "B"),
        ("B - Paris", "B"),
        ("**(B) Paris**", "B"),
        ("option B", "B"),
        ("The correct choice is (B).", "B"),
        ("B Paris", None),
        ("Berlin", None),
        ("A bird", None),
        ("Paris (B)", None),
        ("A) Paris or B) London", None),
        ("A. B and C are wrong.", None),
        ("A: Paris and B", None),
        ("K) Paris", None),
        ("", None),
    ],
)
def test_a_line_names_one_choice_at_its_start(line, letter):
    assert choice_in(line) == letter


@pytest.mark.parametrize(
    ("gold", "is_one"), [("B", True), ("(B)", True), ("B.", True), ("b", False), ("42", False)]
)
def test_the_letter_of_a_choice_may_be_in_brackets(gold, is_one):
    assert (choice_of(gold) is not None) is is_one
