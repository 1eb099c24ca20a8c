import pytest

from lit_grpo.rewards.math_answers.structure import (
    Items,
    depth_of,
    depth_of_end,
    is_name,
    items_of,
    readings_of,
    sides_of,
    split,
    without_thousands,
)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("x", 0),
        ("(1)(2)", 1),
        (r"\{(a, [b])\}", 3),
        (r"\frac{1}{\lfloor x \rfloor}", 2),
        ("((((", 4),
        ("))", 2),
        (r"\begin{cases} (x) \end{cases}", 2),
    ],
)
def test_depth_counts_brackets_whether_they_are_closed_or_not(text, depth):
    assert depth_of(text) == depth


@pytest.mark.parametrize(("text", "end"), [("a(b)", 0), ("(a", None), ("a)(b", None), ("", 0)])
def test_all_brackets_are_closed_or_the_depth_is_unknown(text, end):
    assert depth_of_end(text) == end


@pytest.mark.parametrize(
    ("text", "brackets", "texts"),
    [
        ("5", "", ("5",)),
        ("1, 2", "", ("1", "2")),
        ("1; 2", "", ("1", "2")),
        ("1 and 2", "", ("1", "2")),
        (r"1 \text{ or } 2", "", ("1", "2")),
        ("(1, 2)", "()", ("1", "2")),
        ("[0,1)", "[)", ("0", "1")),
        (r"\{a, b\}", "{}", ("a", "b")),
        ("(1,2), (3,4)", "", ("(1,2)", "(3,4)")),
        ("f(x, y)", "", ("f(x, y)",)),
        ("(x+1)", "", ("(x+1)",)),
        ("1,234", "", ("1234",)),
        ("1,234, 5,678", "", ("1234", "5678")),
        ("(1,234)", "()", ("1", "234")),
        ("(1,234, 5)", "()", ("1234", "5")),
        (r"1 \pm 2", "", ("1 + 2", "1 - 2")),
        (r"\pm 2", "", ("2", "- 2")),
    ],
)
def test_a_list_is_taken_apart_outside_of_inner_brackets(text, brackets, texts):
    assert items_of(text) == Items(brackets=brackets, texts=texts)


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("x = 1, x = 2", ("1", "2")),
        ("x = 1, 2", ("1", "2")),
        (r"x = \pm 2", ("2", "- 2")),
    ],
)
def test_equations_for_one_variable_are_its_values(text, texts):
    assert items_of(text) == Items(brackets="", texts=texts, name="x")


def test_equations_for_several_variables_stay_whole():
    assert items_of("x = 1, y = 2") == Items(brackets="", texts=("x = 1", "y = 2"))


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        ("x", ["x"]),
        ("x = 5", ["x", "5"]),
        ("a = b = c", ["a", "b", "c"]),
        ("x <= 5", ["x <= 5"]),
        ("x != 5", ["x != 5"]),
        (r"\sum_{n=1}^3 n = 6", [r"\sum_{n=1}^3 n", "6"]),
    ],
)
def test_an_equation_has_the_sides_of_its_equals_signs(text, sides):
    assert sides_of(text) == sides


def test_both_sides_of_an_approximation_are_readings():
    assert readings_of(r"\sqrt{2} \approx 1.414") == [r"\sqrt{2}", "1.414"]
    assert readings_of("5") == ["5"]


@pytest.mark.parametrize(
    "text", ["x", "x_1", "x_{12}", "f(x)", r"\theta", "y'", "area", "Total cost"]
)
def test_variables_functions_and_words_are_names(text):
    assert is_name(text)


@pytest.mark.parametrize("text", ["5", "xy", "2x", "x+1", "x^2", ""])
def test_anything_else_is_no_name(text):
    assert not is_name(text)


def test_only_commas_of_thousands_are_removed():
    assert without_thousands("1,234,567 and 1,23 and 12,345") == "1234567 and 1,23 and 12345"


def test_texts_are_split_at_the_top_level_only():
    assert split("a,(b,c),{d,e}", {","}) == ["a", "(b,c)", "{d,e}"]
