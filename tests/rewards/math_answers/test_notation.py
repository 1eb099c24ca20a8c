import pytest

from lit_grpo.rewards.math_answers.notation import clean


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\u22127", "-7"),
        ("3×4", r"3\times 4"),
        ("x²", "x^2"),
        ("2½", "2 1/2"),
        ("90°", r"90^\circ"),
        ("1\u202f000\tm", "1 000 m"),
        ("x≤5", r"x\le 5"),
    ],
)
def test_characters_become_latex_or_plain_text(text, plain):
    assert clean(text) == plain


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"\left( x \right]", "( x ]"),
        (r"\displaystyle\frac{1}{2}", r"\frac{1}{2}"),
        (r"\mathbf{x}+1", "x+1"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac{1}2", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"x \leq 5", r"x \le 5"),
        (r"x \neq 5", r"x \ne 5"),
        (r"25\%", "25%"),
        (r"1{,}000", "1,000"),
        (r"\mathrm{sin}\,x", r"\sin x"),
        ("2**3", "2^3"),
        ("sin x", r"\sin x"),
        (r"30^{\circ}", r"30^\circ"),
        (r"\varnothing", r"\emptyset"),
    ],
)
def test_synonyms_become_one_notation(text, plain):
    assert " ".join(clean(text).split()) == plain


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("$5$", "5"),
        ("$$x+1$$", "x+1"),
        (r"\(5\)", "5"),
        (r"\[5\]", "5"),
        ("**5**", "5"),
        ("`5`", "5"),
        ('"yes"', "yes"),
        (r"\boxed{5}", "5"),
        (r"\text{Tuesday}", "Tuesday"),
        (r"**$\boxed{5}$.**", "5"),
        ("(5)", "5"),
        (" 5. ", "5"),
        ("Total: 5", "5"),
        (r"\approx 5", "5"),
        (r"\text{The area is }5", "5"),
    ],
)
def test_what_surrounds_a_whole_answer_is_removed(text, plain):
    assert clean(text) == plain


@pytest.mark.parametrize(
    "text", ["(1, 2)", "[0,1)", r"\{1,2\}", "(1)(2)", "x = 5", "$5 and more", "5!"]
)
def test_what_belongs_to_the_answer_stays(text):
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"\begin{align} x &= 9 + 9 \\ &= 18 \end{align}", "x = 9 + 9 = 18"),
        (r"\begin{aligned} x &= 1 \\ y &= 2 \end{aligned}", "x = 1, y = 2"),
        (r"\begin{cases} x = 1 \\ y = 2 \end{cases}", "x = 1, y = 2"),
        (r"\begin{align} 2x &= 4, \\ x + 1 &= 3 \end{align}", "x + 1 = 3"),
    ],
)
def test_rows_become_equations_or_the_last_of_a_derivation(text, plain):
    assert " ".join(clean(text).split()) == plain


def test_cases_that_are_no_equations_stay():
    text = r"\begin{cases} 1 & x > 0 \\ 2 & x < 0 \end{cases}"
    assert clean(text) == text
