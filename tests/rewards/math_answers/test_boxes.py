import pytest

from lit_grpo.rewards.math_answers.boxes import MAX_BOXES, boxed_answer


def found(text: str) -> str | None:
    answer = boxed_answer(text)
    return None if answer is None else answer.text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{5}, in the end it is \boxed{7}.", "7"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed 18 eggs", "18"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{5} \boxed{} \boxed{ }", "5"),
        (r"\boxed{5} and so \boxed{3", "5"),
        (r"} \boxed{5}", "5"),
    ],
)
def test_the_last_complete_box_with_content_has_the_answer(text, answer):
    assert found(text) == answer


@pytest.mark.parametrize("text", ["", "5", r"\boxed{5", r"\boxed{}", r"boxed{5}"])
def test_without_a_complete_box_there_is_no_answer(text):
    assert boxed_answer(text) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"$\boxed{3}$ and $\boxed{5}$", "3, 5"),
        (r"\boxed{1}, \boxed{2}, or \boxed{3}", "1, 2, 3"),
        (r"\boxed{3} \text{ and } \boxed{5}", "3, 5"),
        (r"$x=\boxed{3}$, $y=\boxed{5}$", "x=3, y=5"),
        (r"$x_1 = \boxed{3}$ and $x_2 = \boxed{5}$", "x_1=3, x_2=5"),
        (r"$x=\boxed{3}$ and $x=\boxed{5}$", "3, 5"),
        (r"\boxed{5}, or \boxed{5}", "5"),
    ],
)
def test_boxes_that_are_joined_form_a_list(text, answer):
    assert found(text) == answer


@pytest.mark.parametrize(
    "between", [" ", ", which is less than ", ". Thus ", " and " + " " * 90, ", no, "]
)
def test_boxes_with_anything_else_between_them_are_no_list(between):
    assert found(rf"\boxed{{3}}{between}\boxed{{5}}") == "5"


def test_a_list_has_no_more_boxes_than_are_looked_at():
    text = ", ".join(rf"\boxed{{{number}}}" for number in range(30))
    assert found(text) == ", ".join(map(str, range(30 - MAX_BOXES, 30)))
