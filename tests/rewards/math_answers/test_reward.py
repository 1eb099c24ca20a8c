import asyncio
import json
import os
from itertools import pairwise

import pytest
from paths import GSM8K
from tiny import completion, prompt
from worker_processes import guards_of

from lit_grpo.rewards import MathReward
from lit_grpo.rewards.math_answers.answers import compare
from lit_grpo.rewards.math_answers.extraction import STOP_MARKERS, find_answer, read_gold
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import UserError

HANGS = r"\boxed{\binom{1000000000}{500000000}}"


def scores(suite, *pairs):
    prompts = [prompt(answer=gold) for gold, _ in pairs]
    batch = suite.score(prompts, [[completion(text=text)] for _, text in pairs])
    return [group.scores["math"][0] for group in batch.groups]


@pytest.fixture(scope="module")
def suite():
    with RewardSuite([MathReward(deadline_seconds=20)]) as started:
        yield started


RIGHT = [
    # Nothing but the gold, a word or a letter.
    ("fbab", "fbab"),
    ("Paris", "paris."),
    ("B", "B"),
    ("yes", "Yes"),
    ("UK", "UK"),
    ("H2O", " H2O.\n"),
    ("ab", "ab"),
    ('["NO", "Norway"]', "NO"),
    # A choice, and no article.
    ("A", "The answer is A."),
    ("A", "So the correct option is A"),
    ("A", "The answer is A because B is too large."),
    ("A", "The answer is a."),
    ("A", "A) Paris"),
    ("(B)", "The answer is (B) Paris."),
    ("B", "**Option B** is the correct answer."),
    ("B", "<answer>B. Paris</answer>"),
    ("The answer is B.", "So it is this one.\nAnswer: B - Paris\nA and C are in France."),
    ('["B", "C"]', "The answer is option C."),
    ("B", "The answer is B) 2.\n\nQuestion: What is 1 + 1?\nAnswer: C) 2"),
    ("4", "The answer is a number, namely 4"),
    ("12", "The answer is an even number: 12"),
    # Right answers that math-verify alone finds wrong.
    ("7/4", r"\boxed{1 3/4}"),
    (r"\frac{8}{3}", "The answer is 2 2/3."),
    ("1500", "#### 1.5e3"),
    ("1234567", "The answer is 1.234.567"),
    ("-7", "The answer is \u22127."),
    ("12:30", "They meet at 12:30."),
    ("9/7", r"\dfrac{9}{7}"),
    (r"\frac{9}{7}", r"So it is \dfrac{9}{7}."),
    ("7", r"\boxed{5}, no, \boxed{7}"),
    ("[0,1)", r"\boxed{0\le x<1}"),
    (r"0 \le x < 1", r"\boxed{[0,1)}"),
    ("3x+4y+14=0", r"\boxed{6x+8y+28=0}"),
    ("5", "The answer is 5.\nHuman: What is 2 + 2?\nAssistant: The answer is 4"),
    # One of several gold answers, and an interval.
    ('["1", "2"]', "The answer is 2."),
    (r'["\\frac{1}{2}", "0.5"]', r"\boxed{0.5}"),
    ('[ "Paris" ]', "Paris"),
    ("[1, 2]", r"\boxed{1 \le x \le 2}"),
    # A percent sign is a unit.
    ("25%", "The answer is 25"),
    ("25", r"\boxed{25\%}"),
    # Formats of gold answers.
    ("She sold 48/2 = <<48/2=24>>24 clips.\n#### 72", "#### 72"),
    ("A: 72", "The answer is 72 clips."),
    (r"\boxed{72}", "72"),
    ("The answer is 72.", "A: 72"),
    # Computer algebra.
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
    (r"\sqrt{2}", r"\boxed{1.414214}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    ("5", r"\boxed{x = 5}"),
    ("6", r"\boxed{2 \cdot 3}"),
    ("120", r"\boxed{5!}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("(1,2)", r"\boxed{\left(1, 2\right)}"),
    ("1,2", r"\boxed{2, 1}"),
    (r"(-\infty,1)\cup(1,\infty)", r"\boxed{x \ne 1}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"),
    (r"\frac{1}{2^{99}}", r"\boxed{1/2^{99}}"),
    ("x^2+y^2=25", r"\boxed{2x^2+2y^2=50}"),
    ("y = 1/x", r"\boxed{xy=1}"),
    (r"\text{Tuesday}", "The answer is Tuesday."),
    ("C", "The answer is (C)."),
]

WRONG = [
    # Another choice, or more than one.
    ("A", "The answer is B) Paris."),
    ("A", "A) Paris or B) London"),
    ("A", "A) Paris\nB) London"),
    ("A", r"A) is wrong. \boxed{B}"),
    ("A", "The answer is B) 2.\n\nQuestion: What is 1 + 1?\nAnswer: A) 2"),
    ("Paris", "B) London"),
    # All of a list in place of one of it, and what is no list of answers.
    ('["1", "2"]', r"\boxed{1, 2}"),
    ('["1", "2"]', r"\boxed{3}"),
    ("[1, 2]", r"\boxed{1}"),
    # Wrong answers that math-verify alone finds right.
    ("3", r"\boxed{1 3/4}"),
    ("2", r"\boxed{2 2/3}"),
    ("1.5", r"\boxed{1.5e3}"),
    ("1.234", r"\boxed{1.234.567}"),
    ("2/5", r"\boxed{12:30}"),
    ("12:30", r"\boxed{2/5}"),
    ("1/2^99", r"\boxed{1/2^98}"),
    (r"\{1/2^{99}\}", r"\boxed{\{1/2^{98}\}}"),
    ("0.25", r"\boxed{25\%}"),
    ("25%", r"\boxed{0.25}"),
    ("(1,2)", r"\boxed{\{1,2\}}"),
    (r"\{1,2\}", r"\boxed{(1,2)}"),
    ("(1,2,3)", r"\boxed{\{1,2,3\}}"),
    ("3x+4y+14=0", r"\boxed{3*x-1*y+13=0}"),
    ("3*x-1*y+13=0", "The answer is 3x+4y+14=0"),
    ("3x+4y+14=0", "3*x-1*y+13=0"),
    ("9", r"\dfrac{9}{7}"),
    ("7", r"\dfrac{9}{7}"),
    ("5", r"\boxed{5} \boxed{7}"),
    ("[0,1)", r"\boxed{0\le x\le 1}"),
    ("4", "The answer is 5.\nHuman: What is 2 + 2?\nAssistant: The answer is 4"),
    ("x^2+1=0", r"\boxed{x^2+4=0}"),
    (r"\frac{\sqrt{4}}{20000000}", r"\boxed{0.0000003}"),
    ("xyz", r"\boxed{zyx}"),
    # Several answers at once.
    ("5", r"\boxed{5 \text{ or } 6}"),
    ("6", r"\boxed{5, 6}"),
    # Words that are not the gold.
    ("Paris", "London"),
    ("B", "C"),
    # No answer, or one that cannot be parsed.
    ("5", ""),
    ("5", "I do not know."),
    ("5", r"\boxed{5 [[ \frac}"),
    ("5", r"\boxed{\frac{1}{0}}"),
    ("3", r"\sqrt{3}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\end{pmatrix}}"),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_right_answer_is_right(suite, gold, text):
    (score,) = scores(suite, (gold, text))
    assert (score.value, score.detail) == (1.0, "")


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_wrong_answer_is_wrong(suite, gold, text):
    (score,) = scores(suite, (gold, text))
    assert (score.value, score.detail) == (0.0, "")


def test_values_of_right_and_wrong_answers_can_be_set():
    with RewardSuite([MathReward(correct=2.0, wrong=-0.5)]) as suite:
        assert [score.value for score in scores(suite, ("5", "5"), ("5", "6"))] == [2.0, -0.5]


def test_workers_start_only_for_answers_that_need_computer_algebra():
    others = guards_of(os.getpid())
    with RewardSuite([MathReward(num_workers=2)]) as suite:
        assert scores(suite, ("5", "5"), ("5", "6"))[0].value == 1.0
        assert guards_of(os.getpid()) == others
        pairs = [("5", rf"\boxed{{\sqrt{{{n}}}}}") for n in range(20, 30)]
        assert [score.value for score in scores(suite, *pairs)] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
        assert len(guards_of(os.getpid()) - others) == 2
        suite.open([prompt(answer="5")], 1).add(0, completion(text=HANGS))
    assert guards_of(os.getpid()) == others


@pytest.mark.parametrize(
    "gold",
    [
        *(None, "", "nan", "She sold seventy-two clips in May", "[[ 5", "####"),
        *('["5", "nan"]', '["5", ["6"]]', '{"value": "5"}', '[{"value": "5"}]', "[]"),
    ],
)
def test_gold_that_no_answer_can_match_is_refused_before_training(suite, gold):
    rows = [prompt(id="good", answer="5"), prompt(id="bad", answer=gold)]
    with pytest.raises(ValueError, match="1 of 2 that are not: bad: .*answer column"):
        suite.check(rows)


def test_refusal_counts_the_golds_and_shows_a_few():
    rows = [prompt(id=f"p{n}", answer=None) for n in range(7)]
    with RewardSuite([MathReward()]) as suite, pytest.raises(ValueError, match="7 of 7") as error:
        suite.check(rows)
    assert "p4: None, … (" in str(error.value)
    assert "p5" not in str(error.value)


def test_good_golds_pass_the_check(suite):
    suite.check([prompt(answer=gold) for gold, _ in RIGHT])


def test_score_against_an_unreadable_gold_is_an_error_and_not_wrong(suite):
    (score,) = scores(suite, (None, "5"))
    assert (score.value, score.outcome) == (None, "error")
    assert "gold answer None of prompt p is not readable" in score.detail


@pytest.mark.parametrize(
    ("setting", "rule"),
    [("deadline_seconds", "positive"), ("num_workers", ">= 1"), ("tail_characters", ">= 1")],
)
def test_limit_out_of_range_is_refused(setting, rule):
    with pytest.raises(ValueError, match=f"{setting} must be {rule}, got 0"):
        MathReward(**{setting: 0})


SOLUTIONS = GSM8K / "test.jsonl"


@pytest.mark.skipif(not SOLUTIONS.exists(), reason="the GSM8K files are not in the repository")
def test_gsm8k_solutions_are_right_for_their_own_gold_only():
    solutions = [json.loads(line)["answer"] for line in SOLUTIONS.read_text().splitlines()]
    golds = [read_gold(solution) for solution in solutions]
    answers = [find_answer(solution, STOP_MARKERS, 1000) for solution in solutions]
    assert all(compare(gold, answer) is True for gold, answer in zip(golds, answers, strict=True))
    for (gold, _), (other, answer) in pairwise(zip(golds, answers, strict=True)):
        assert compare(gold, answer) is (gold.number == other.number)


@pytest.mark.parametrize("gold", ["NA", "None"])
def test_a_gold_that_stands_for_a_missing_one_says_so_and_how_to_keep_it(gold):
    with pytest.raises(UserError) as error:
        asyncio.run(MathReward().check([prompt(answer=gold)]))
    assert f"'{gold}' count as missing" in str(error.value)
    assert f"write \\boxed{{{gold}}}." in str(error.value)
    assert read_gold(f"\\boxed{{{gold}}}") is not None
