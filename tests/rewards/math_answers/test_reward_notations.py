r"""What is rewarded: common endings of solutions, and notations that were once read wrongly."""

from collections import defaultdict

import pytest
from _benchmark.answers import endings, rewritten_golds
from tiny import completion, prompt

from lit_grpo.rewards import MathReward
from lit_grpo.rewards.scoring.suite import RewardSuite

UNREADABLE = r"\binom{1000000000}{500000000}"
"""It takes the parser forever."""
HUGE = "1" + "0" * 600
CASES = defaultdict(list)
for ending in endings():
    CASES[ending.template].append(ending)


@pytest.fixture(scope="module")
def suite():
    with RewardSuite([MathReward(deadline_seconds=30)]) as started:
        yield started


def values(suite, pairs):
    prompts = [prompt(answer=gold) for gold, _ in pairs]
    batch = suite.score(prompts, [[completion(text=text)] for _, text in pairs])
    return [group.scores["math"][0].value for group in batch.groups]


@pytest.mark.parametrize("cases", CASES.values(), ids=map(repr, CASES))
def test_common_ending_is_rewarded_with_the_right_answer_only(suite, cases):
    found = values(suite, [(case.gold, case.text) for case in cases])
    assert found == [float(case.is_right) for case in cases]


def test_gold_answers_are_equal_in_other_notations_and_to_nothing_else(suite):
    cases = list(rewritten_golds())
    found = values(suite, [(case.gold, case.text) for case in cases])
    wrong = [case for case, one in zip(cases, found, strict=True) if one != case.is_right]
    assert wrong == []


RIGHT = [
    (
        "8",
        "3 friends share 24 apples.\n\nQuestion: how many each?\n\n\\boxed{8}",
    ),
    ("18", "The answer is <answer>18</answer>"),
    ("3x+2", "3x + 2"),
    ("3x+2", "So f(x) is 3*x + 2."),
    ("x+1", "1 + x"),
    ("a+b", "a + b"),
    ("3+4i", "3 + 4i"),
    ("2x", "2·x"),
    ("x=3,y=4", "x=3, y=4"),
    ("3 m/s", r"\boxed{3 \text{ m/s}}"),
    ("3 m/s", r"\boxed{3\,\mathrm{m/s}}"),
    ("3 m/s", "It is 3.0 m/s."),
    ("9.8 m/s^2", r"\boxed{9.8 \text{ m/s}^2}"),
    ("3.0", r"\boxed{3.0 m/s}"),
    ("18", "<SOLUTION>18</SOLUTION>"),
    ("18", "It is 18<|im_end|>"),
    ("18", "18</s>"),
    ("18", "The answer is **18** dollars."),
    ("18", "\\[\nx = 18\n\\]"),
    ("18", "\\begin{align}\nx &= 9 + 9 \\\\\n&= 18\n\\end{align}"),
    ("18", "The answer is:\n$$\n18\n$$"),
    ("18", "The answer is:\n$$\n18"),
    ("18", "Answer: The value of $x$ is 18"),
    ("18", "#### Step 3\nAdd 4 and 14.\n\nThe answer is 18."),
    ("18", "The answer is therefore 18"),
    ("18", "The answer is simply 18."),
    ("18", "The answer is about 18."),
    ("18", "The answer is 18 (eggs)."),
    ("18", "The answer is $18/day."),
    ("1234", r"\boxed{x=1,234}"),
    ("1234, 5678", r"\boxed{1,234, 5,678}"),
    ("1234 and 5678", "The answers are 1,234 and 5,678."),
    ("18", r"\boxed 18"),
    ("18", r"$\boxed 18$"),
    ("18", r"\boxed{\bf 18}"),
    ("x+1", r"\boxed{\boldsymbol{x+1}}"),
    ("18", r"\boxed{\approx 18}"),
    ("18", r"\boxed{x \approx 18}"),
    ("1/3", r"\boxed{0.\overline{3}}"),
    (r"0.\overline{3}", r"\boxed{\frac13}"),
    ("x^{1/2}", r"\boxed{x^\frac12}"),
    ("3, 5", r"x = \boxed{3} and x = \boxed{5}"),
    ("3, 5", r"The answers are $\boxed{3}$, $\boxed{5}$."),
    ("x=3, y=5", r"$x = \boxed{3}$ and $y = \boxed{5}$"),
    ("(3,5)", r"$x = \boxed{3}$ and $y = \boxed{5}$"),
    ("25", "The area is 25 m²."),
    ("5000000", "5 million"),
    ("60", r"\boxed{5\text{ dozen}}"),
    ("500", r"\boxed{5\text{00}}"),
    ("6s", r"\boxed{6s}"),
    ("6s", r"\boxed{6 s}"),
    ("4 hours 30 minutes", r"\boxed{4 \text{ hours } 30 \text{ minutes}}"),
    ("1,1,2", r"\boxed{2,1,1}"),
    ("x=5, y=6", "The answer is:\nx = 5\ny = 6"),
    ("x=5, y=6", r"\boxed{\begin{cases} x=5 \\ y=6 \end{cases}}"),
    ("x=5, y=6", r"\boxed{y=6, x=5}"),
    (r"\sqrt{2}", r"\boxed{\sqrt{2} \approx 1.414}"),
    ("1.414", r"\boxed{\sqrt{2} \approx 1.414}"),
    ("204_5", r"\boxed{204_{5}}"),
    ("204_5", r"\boxed{204}"),
    ("No", r"\boxed{\text{No}}"),
    ("yes", "The answer is Yes."),
    (r"\{x|x>1\}", r"\boxed{(1,\infty)}"),
    ("x=1 or x=2", r"\boxed{x=2,1}"),
    (r"x=\pm 2", r"\boxed{x=2, x=-2}"),
    (r"1\pm\sqrt2", r"\boxed{1-\sqrt{2}, 1+\sqrt{2}}"),
    (r"\boxed{3} and \boxed{5}", r"\boxed{3, 5}"),
    ("N=n+1", r"\boxed{N = 1 + n}"),
    ("x+y=3", r"\boxed{2x + 2y = 6}"),
    ("2x+1", r"\boxed{y=2x+1}"),
    ("y=2x+1", r"\boxed{2x+1}"),
    ("3", r"\boxed{i^{4}+2}"),
    ("-1", r"\boxed{i^2}"),
    ("3+2i", r"\boxed{2i+3}"),
    (r"\left\lfloor \frac{n}{2}\right\rfloor+1", r"\boxed{1+\lfloor n/2 \rfloor}"),
    ("C", r"\boxed{\text{(C)}}"),
    ("C", "The answer is **C**."),
    ("C", r"\boxed{C}"),
    (r"\frac{\pi}{4}", r"\boxed{pi/4}"),
    ("2^{1009}", r"\boxed{2^{1009}}"),
    ("2^{1009}", r"\boxed{2 \cdot 2^{1008}}"),
    ("(1,2),(3,4)", r"\boxed{(3,4),(1,2)}"),
    ("(1,2) and (3,4)", r"\boxed{(1,2), (3,4)}"),
    (r"\{1,2\}", r"\boxed{1, 2}"),
    ("120", r"\boxed{5!}"),
    (r"x^2 \ln x", r"\boxed{\ln(x) x^2}"),
    (r"\frac{x}{2}+C", r"\boxed{\frac{1}{2}x + C}"),
    (r"3 \text{ cm}", r"\boxed{3}"),
    ("3", r"\boxed{3 \text{ cm}^2}"),
    ("x>3", r"\boxed{3<x}"),
    (r"0 \le x < 1", r"\boxed{x \in [0,1)}"),
    ("12 m", r"\boxed{12m}"),
    ("18", "The answer is 18 eggs per day, or about 126 a week."),
    ("18", "**18**\n\nLet me know if you need more help!"),
    ("18", "Final Answer: The final answer is $18$. I hope it is correct."),
    ("18", "So the answer is $9 + 9 = 18$."),
    ("18", "So the answer is 9 + 9 = 18."),
    ("18", "Thus, there are 9 + 9 = 18 eggs left."),
    ("7", "The answer is 5 + 2 = **7**."),
    ("A", "The correct option is **A**."),
    ("0.5", "The answer is .5"),
    ("3/4", "The answer is 3/4 of a cup."),
    ("1 3/4", "The answer is 1 3/4 cups."),
    ("1 3/4", r"The answer is $1\frac{3}{4}$ cups."),
    ("18", "The answer is eighteen (18)."),
    ("18", r"Answer: \(18\) dollars"),
    ("18", "Answer: $18$ dollars"),
    ("18", "The answer is $18$ dollars."),
    ("18", r"\boxed{18}" + " We check it again and again." * 60),
]
WRONG = [
    ("8", "There are 8 of them.\n\n**Problem:** how many are left?\n\n\\boxed{5}"),
    ("8", "There are 8 of them.\nUser: and?\n\\boxed{5}"),
    ("8", r"8 Q: what? \boxed{5}"),
    ("1=2", r"\boxed{2^3=8}"),
    ("N=n+1", r"\boxed{N=n}"),
    ("x=1", r"\boxed{0=0}"),
    ("x+y=3", r"\boxed{1=1}"),
    ("2x=4", r"\boxed{1=1}"),
    ("4", r"\boxed{4 hours 30 minutes}"),
    ("4", r"\boxed{4\text{ hours }30\text{ minutes}}"),
    ("4", "The answer is 4 hours 30 minutes."),
    ("6s", r"\boxed{6s^2}"),
    ("6s", r"\boxed{6}"),
    ("6", r"\boxed{6s^2}"),
    ("6s", r"\boxed{6t}"),
    ("2", "The area is 25 m²."),
    ("1,2,2", r"\boxed{1,1,2}"),
    ("1, 1", r"\boxed{1}"),
    ("1", r"\boxed{1,1}"),
    ("x=1,y=2", r"\boxed{x=2,y=1}"),
    ("x=5, y=6", "The answer is:\nx = 5\ny = 7"),
    ("6", r"\boxed{x=5, y=6}"),
    ("6", "The answer is:\nx = 5\ny = 6"),
    ("x=5", r"\boxed{x=4, x=5}"),
    (r"\boxed{3} and \boxed{5}", r"\boxed{5}"),
    ("5", r"\boxed{3} and \boxed{5}"),
    ("5", r"$x=\boxed{3}$, $y=\boxed{5}$"),
    (r"\frac{2^{2000}+1}{3^{2000}}", r"\boxed{\frac{2^{2000}+2}{3^{2000}}}"),
    (r"\sqrt{2}", r"\boxed{\sqrt{2}\approx 1.5}"),
    (r"\sqrt{2}", r"\boxed{\sqrt{2}\approx 2}"),
    ("2", r"\boxed{\sqrt{2}\approx 2}"),
    ("204_7", r"\boxed{204_5}"),
    ("204", r"\boxed{204_5}"),
    ("204_5", r"\boxed{205_5}"),
    ("On", r"\boxed{No}"),
    ("on", r"\boxed{no}"),
    ("On", r"\boxed{\text{No}}"),
    ("no", r"\boxed{\text{on}}"),
    ("5", r"\boxed{5 million}"),
    ("5", r"\boxed{5\text{ million}}"),
    ("5", "The answer is 5 million."),
    ("5", r"\boxed{5\text{ dozen}}"),
    ("5", "The answer is 5 dozen."),
    ("5", r"\boxed{5\text{00}}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{3 + \begin{pmatrix}1\\2\end{pmatrix}}"),
    ("5", r"\boxed{9^{9^{9^9}}}"),
    ("x+1", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}+x}"),
    ("x+1", r"\boxed{\frac{}{}}"),
    ("2", "3x + 2"),
    ("1", "So we get x + 1."),
    ("-3", "2x - 3"),
    ("34", "12 + 22"),
    ("3 m/n", r"\boxed{3}"),
    ("x+1", r"\boxed{[[[[}"),
    (r"x=\ln 3, \ln 5", r"\boxed{t=\ln 3, \ln 5}"),
    ("x=0, x=2", r"\boxed{b=0, x=2}"),
    ("3x^2", r"\boxed{3x^3}"),
    ("x^2+1=0", r"\boxed{x^2+4=0}"),
    ("2<3", r"\boxed{1<5}"),
    ("x>3", r"\boxed{x<3}"),
    ("x>3", r"\boxed{x\ge3}"),
    (r"x \ne 3", r"\boxed{x=3}"),
    ("x=3", r"\boxed{x\ne 3}"),
    ("18", "The answer is not 18."),
    ("18", "#### Step 18\nThe answer is 5."),
    ("C", r"\boxed{A}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    (r"1-\sqrt2", r"\boxed{1\pm\sqrt2}"),
    ("12 m", r"\boxed{12}"),
    (rf"\frac{{{HUGE}1}}{{3}}", rf"\boxed{{\frac{{{HUGE}2}}{{3}}}}"),
    (rf"\frac{{{'7' * 2500}}}{{3}}", rf"\boxed{{\frac{{{'7' * 2499}8}}{{3}}}}"),
    ("5", r"\boxed{" + "(" * 400 + "}"),
    ("x+1", r"\boxed{" + "(" * 400 + "x+1"),
    ("x+1", "(" * 5000),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_right_answer_in_this_notation_is_rewarded(suite, gold, text):
    assert values(suite, [(gold, text)]) == [1.0]


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_wrong_answer_in_this_notation_is_not_rewarded(suite, gold, text):
    assert values(suite, [(gold, text)]) == [0.0]


@pytest.mark.slow
def test_answer_that_cannot_be_read_in_time_is_wrong():
    with RewardSuite([MathReward(deadline_seconds=1.0, num_workers=1)]) as suite:
        assert values(suite, [("5", rf"\boxed{{{UNREADABLE}}}")]) == [0.0]


@pytest.mark.slow
def test_deadline_is_a_timeout_if_the_gold_answer_cannot_be_read_in_time_either():
    with RewardSuite([MathReward(deadline_seconds=1.0, num_workers=1)]) as suite:
        batch = suite.score([prompt(answer=UNREADABLE)], [[completion(text=r"\boxed{x+1}")]])
        score = batch.groups[0].scores["math"][0]
        assert (score.value, score.outcome) == (None, "timeout")
        assert "no answer within 1 s" in score.detail
