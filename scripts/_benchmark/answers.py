"""Compare `MathReward` with math-verify on generated answers: what they reward, and how fast."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from _benchmark import answer_endings as written
from _benchmark.results import Result

NUM_NUMBERS = 2000
NUM_FORMULAS = 300
DEADLINE_SECONDS = 20.0

GOLDS = [
    *("2n-2", "2^{1009}", r"\frac{1}{2n+2}", r"m n-\lfloor m / 2\rfloor", r"\binom{2n}{n}"),
    *("(1,8,19), (2,7,13), (4,5,7)", "f(x)=2x", "69, 84", "(2,4)", r"\frac{9}{32}\sqrt{2}"),
    *(
        r"\frac{100!}{2^{50}}",
        "-2, 0, 3",
        r"\frac{n(n+1)(2n+1)}{6}",
        "x^2+3x-7",
        r"6a^2\sqrt[3]{5a}",
    ),
    *("28-21i", r"\frac{7x+13}{4x}", r"(-\infty,-3)\cup(5,\infty)", "x=-6, 9", r"\frac{x}{2}+C"),
    *(r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}", r"[-2\pi, 3\pi]", "y^2=-28(x-7)", "210^\\circ"),
    *(r"\log_{7}\left(\frac{x}{49}\right)", r"\{2, 3, 5\}", "x<-7", r"c_1e^{3t}+c_2e^{-5t}"),
    *(
        r"\sum_{n=0}^{\infty}\frac{2}{2n+3}x^{2n}",
        r"\frac{t}{3}+\frac{\sin 2t}{4}",
        "204_5",
        "25000",
    ),
]
"""Answers of the kinds that college and olympiad problems have."""
REWRITES: list[Callable[[str], str]] = [
    lambda gold: gold,
    lambda gold: gold.replace("frac", "dfrac"),
    lambda gold: re.sub(r"([-+=,])", r" \1 ", gold),
    lambda gold: re.sub(r"(?<![a-z]) ", "", gold),
    lambda gold: (
        gold.replace("(", r"\left(").replace(")", r"\right)").replace(r"\left\left", r"\left")
    ),
    lambda gold: rf"\displaystyle {{{gold}}}",
    lambda gold: rf"{gold}\quad",
]
_TOKEN = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z](?![a-zA-Z])|\d")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCase:
    """A completion, and whether it is right."""

    gold: str
    text: str
    is_right: bool
    template: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What was rewarded, and the seconds that it took."""

    rewarded: list[bool]
    seconds: float

    @property
    def share(self) -> str:
        return f"{sum(self.rewarded)} of {len(self.rewarded)}"


Scorer = Callable[[Sequence[AnswerCase]], Scores]


def endings() -> Iterator[AnswerCase]:
    """Yield each template with five right and five wrong answers."""
    for templates, answers in [
        (written.FORMULA_ENDINGS, written.FORMULAS),
        (written.NUMBER_ENDINGS, written.NUMBERS),
        (written.AMOUNT_ENDINGS, written.AMOUNTS),
        (written.GROUPED_ENDINGS, written.GROUPED),
    ]:
        for template in templates:
            for gold, wrong in answers:
                right = _grouped(gold) if templates is written.GROUPED_ENDINGS else gold
                for answer, is_right in ((right, True), (wrong, False)):
                    text = written.REASONING + template.replace("@", answer)
                    yield AnswerCase(template=template, gold=gold, text=text, is_right=is_right)


def rewritten_golds() -> Iterator[AnswerCase]:
    """Yield each gold answer in other notations, and with one digit or letter changed."""
    for gold in GOLDS:
        answers = [(rewrite(gold), True) for rewrite in REWRITES]
        for answer, is_right in [*answers, *((one, False) for one in _changed(gold))]:
            text = rf"So we get \boxed{{{answer}}}."
            yield AnswerCase(gold=gold, text=text, is_right=is_right)


def _changed(gold: str) -> list[str]:
    """Return a gold answer with one token changed, for each of its digits and variables."""
    return [
        gold[: match.start()] + _other(match[0]) + gold[match.end() :]
        for match in _TOKEN.finditer(gold)
    ]


def _other(token: str) -> str:
    return str((int(token) + 1) % 10) if token.isdigit() else "w"


def _grouped(number: str) -> str:
    whole, point, decimals = number.partition(".")
    return f"{int(whole):,}{point}{decimals}"


def compare_answers(rounds: int) -> Iterator[Result]:
    """Compare what is rewarded in all cases, and the least time of numbers and of formulas."""
    groups = {
        f"{kind} {name}": cases
        for name, all_cases in (("endings", endings()), ("golds", rewritten_golds()))
        for kind, cases in _by_truth(all_cases).items()
    }
    scorers: dict[str, Scorer] = {"MathReward": score, "math-verify": score_by_math_verify}
    details: dict[str, dict[str, Any]] = {
        name: {group: scorer(cases).share for group, cases in groups.items()}
        for name, scorer in scorers.items()
    }
    for case, cases in (("numbers", numbers()), ("formulas", formulas())):
        turns = [
            {name: scorer(cases).seconds for name, scorer in scorers.items()} for _ in range(rounds)
        ]
        seconds = {name: min(turn[name] for turn in turns) for name in scorers}
        for name in scorers:
            details[name][f"{case}/s"] = len(cases) / seconds[name]
        yield Result(
            figure="answers",
            case=f"{len(cases)} {case}",
            against="math-verify, each in one process",
            ours=seconds["MathReward"],
            other=seconds["math-verify"],
            unit="s",
            details=details if case == "formulas" else {},
        )


def score(cases: Sequence[AnswerCase]) -> Scores:
    """Score with `MathReward` and one worker, which has started before the time counts."""
    from lit_grpo.rewards import MathReward
    from lit_grpo.types import Completion, Prompt

    rows = [
        (
            Prompt(id="", text="", token_ids=(), answer=case.gold),
            Completion(token_ids=(), sampler_logprobs=(), text=case.text, finish_reason="stop"),
        )
        for case in (*formulas()[:6], *cases)
    ]

    async def score_all() -> Scores:
        reward = MathReward(deadline_seconds=DEADLINE_SECONDS, num_workers=1)
        reward.start()
        await asyncio.gather(*(reward.score(*row) for row in rows[:6]))
        start = time.perf_counter()
        scores = await asyncio.gather(*(reward.score(*row) for row in rows[6:]))
        seconds = time.perf_counter() - start
        await reward.close()
        return Scores(rewarded=[one == 1.0 for one in scores], seconds=seconds)

    return asyncio.run(score_all())


def score_by_math_verify(cases: Sequence[AnswerCase]) -> Scores:
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    start = time.perf_counter()
    rewarded = [verify(parse(f"${case.gold}$"), parse(case.text)) for case in cases]
    seconds = time.perf_counter() - start
    logging.disable(logging.NOTSET)
    return Scores(rewarded=rewarded, seconds=seconds)


def numbers() -> list[AnswerCase]:
    """Return solutions with a number as a text ends in GSM8K."""
    return [
        AnswerCase(gold=str(n), text=f"{written.REASONING}#### {n}", is_right=True)
        for n in range(NUM_NUMBERS)
    ]


def formulas() -> list[AnswerCase]:
    """Return solutions with different formulas, none of which equals its gold answer as a text."""
    pairs = [
        pair
        for n in range(2, 2 + NUM_FORMULAS // 3)
        for pair in (
            (rf"{n}\sqrt{{3}}", rf"\sqrt{{{3 * n * n}}}"),
            (f"x^2+{2 * n}x+{n * n}", f"(x+{n})^2"),
            (rf"\frac{{x+{n}}}{{x-{n}}}", rf"1+\frac{{{2 * n}}}{{x-{n}}}"),
        )
    ]
    return [
        AnswerCase(gold=gold, text=rf"So it is \boxed{{{answer}}}.", is_right=True)
        for gold, answer in pairs
    ]


def _by_truth(cases: Iterator[AnswerCase]) -> dict[str, list[AnswerCase]]:
    listed = list(cases)
    return {
        "right": [case for case in listed if case.is_right],
        "wrong": [case for case in listed if not case.is_right],
    }
