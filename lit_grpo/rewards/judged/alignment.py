"""A reward for rubrics that the policy writes: does a judge who follows one put stored answers in
the order of their gold scores? The judge sees the rubric and the answers, never a gold score.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lit_grpo.judge import Finding, Form, Grade, Judge, Text
from lit_grpo.rewards.judged.base import JudgedReward, show_problems, unreadable_rows
from lit_grpo.types import Completion, Measurements, Outcome, Prompt, Score, UserError

if TYPE_CHECKING:
    from lit_grpo.data.scored_answers import ScoredAnswers

ENOUGH_DEVIATION = 0.2
"""Of the judge's scores, from 0 to 1; below it a rubric barely tells answers apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """What the value of one rubric is made of, each part before its coefficient."""

    correlation: float
    """-1 to 1."""
    length: float
    """0 to 1."""
    information: float
    """0 to 1."""
    defense: float
    """0 to 1."""


class RubricAlignmentReward(JudgedReward):
    """How well a rubric orders the stored answers of its row.

    The judge grades each stored answer under the rubric; with s its grades over ``highest``, p
    their mean and d their population deviation, a rubric is worth::

        rank correlation of s with the gold scores (0 where all s are equal)
        - lambda_len     * min(1, tokens of the rubric / length_tokens)
        + lambda_info    * 4 p (1 - p)
        - lambda_defense * max(0, 1 - d / 0.2)

    An answer without a grade leaves the rubric without a value, and so do gold scores that are all
    equal. A blank rubric asks for nothing: every grade is 0, and the judge is not asked.

    Args:
        judge: Which model, where, and what it may use up.
        template: A template that ships, or the path of one of your own, which is given
            ``question``, ``rubric``, ``highest`` and ``items``, each with ``id`` and ``answer``.
        votes: Independent opinions on each answer; their mean counts.
        question_column: The column with the question that the stored answers answer. The prompt
            would not do: it may show which answers are good.
        answers_column: The column with the stored answers: a list of texts, or JSON of one.
        gold_column: The column with their gold scores: a list of numbers, or JSON of one.
        lambda_len: Coefficient of the length penalty.
        lambda_info: Coefficient of the information bonus, which is greatest for a mean of 0.5.
        lambda_defense: Coefficient of the defence penalty for grades that are nearly equal. Keep it
            above ``lambda_info``, or a rubric that grades all answers alike gains by it.
        length_tokens: Tokens of a rubric from which on the length penalty is full.
        highest: The best grade.
        answers_per_call: At most so many stored answers share a call. It saves calls, and the judge
            sees them beside each other.
    """

    template_variables = ("question", "rubric", "highest", "items")
    template_needs = ("rubric", "items")
    overridden_by_environment: ClassVar[Mapping[str, str]] = {
        "lambda_len": "REWARD_LAMBDA_LEN",
        "lambda_info": "REWARD_LAMBDA_INFO",
        "lambda_defense": "REWARD_LAMBDA_DEFENSE",
    }

    def __init__(
        self,
        judge: Judge,
        template: str = "alignment",
        votes: int = 1,
        question_column: str = "question",
        answers_column: str = "answers",
        gold_column: str = "gold_scores",
        lambda_len: float = 0.1,
        lambda_info: float = 0.1,
        lambda_defense: float = 0.2,
        length_tokens: int = 512,
        highest: int = 10,
        answers_per_call: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(judge, template, votes, **settings)
        self.coefficients = {
            "lambda_len": lambda_len,
            "lambda_info": lambda_info,
            "lambda_defense": lambda_defense,
        }
        for name, coefficient in self.coefficients.items():
            if not 0 <= coefficient < math.inf:
                raise _refusal(name, ">= 0 and finite", coefficient)
        counts = [("length_tokens", length_tokens), ("highest", highest)]
        for name, count in [*counts, ("answers_per_call", answers_per_call)]:
            if count < 1:
                raise _refusal(name, ">= 1", count)
        self.question_column = question_column
        self.answers_column = answers_column
        self.gold_column = gold_column
        self.length_tokens = length_tokens
        self.highest = highest
        self.items_per_call = answers_per_call
        self.form = Form({"explanation": Text(), "score": Grade(highest)})
        self._measured: list[Alignment] = []

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuses rows without a question, or without answers and gold scores that can be read."""
        if problems := unreadable_rows(prompts, self._read):
            shown = show_problems(problems)
            raise UserError(
                f"every row must have a question in column {self.question_column!r}, answers in "
                f"{self.answers_column!r} and a gold score for each in {self.gold_column!r}, "
                f"{len(problems)} of {len(prompts)} have not: {shown} (nothing could be compared). "
                "Fill or drop these rows, or set question_column, answers_column and gold_column "
                f"in the init_args of {type(self).__name__}."
            )

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        question, stored = self._read(prompt)
        if not stored.has_contrast:
            detail = f"all gold scores are {stored.gold_scores[0]:g}: no order to agree with"
            return Score(value=None, outcome=Outcome.ABSTAIN, detail=detail)
        if not completion.text.strip():
            return self._valued([0.0] * len(stored.answers), stored, completion, cost=0.0)
        context = {"question": question, "rubric": completion.text, "highest": self.highest}
        scores = await self._grade(context, stored.answers)
        cost = sum(one.cost for one in scores)
        grades = [one.value for one in scores if one.value is not None]
        if len(grades) < len(scores):
            return replace(_first_failure(scores), cost=cost)
        return self._valued(grades, stored, completion, cost)

    def observe(self) -> Measurements:
        observed = super().observe()
        measured, self._measured = self._measured, []
        parts: dict[str, list[float]] = {}
        for one in measured:
            for part, value in asdict(one).items():
                parts.setdefault(f"reward/{self.name}/{part}", []).append(value)
        return replace(observed, means={**observed.means, **parts})

    def _read(self, prompt: Prompt) -> tuple[str, ScoredAnswers]:
        question = prompt.columns.get(self.question_column)
        if not isinstance(question, str) or not question.strip():
            raise UserError(f"{self.question_column} is {question!r}, not a text")
        # Here, since `lit_grpo.data` loads Lightning, which worker processes do without.
        from lit_grpo.data.scored_answers import read_scored_answers

        return question, read_scored_answers(prompt.columns, self.answers_column, self.gold_column)

    async def _grade(self, context: Mapping[str, Any], answers: Sequence[str]) -> list[Score]:
        """The grade of each answer, from 0 to 1, or why there is none."""
        votes = await asyncio.gather(
            *(self._ask(context, answers, vote) for vote in range(self.votes))
        )
        return [
            self.as_score(findings, self._mean_grade, lambda verdict: verdict["score"])
            for findings in zip(*votes, strict=True)
        ]

    async def _ask(
        self, context: Mapping[str, Any], answers: Sequence[str], vote: int
    ) -> list[Finding]:
        """One opinion on each answer, in their order, though they are shown in another one."""
        places = list(range(len(answers)))
        # Files often hold the best answer first, and the policy may know. By the rubric alone: the
        # same one is shown the same way again.
        random.Random(repr((vote, context["rubric"]))).shuffle(places)
        items = [{"answer": answers[place]} for place in places]
        found = await self.examiner.examine(context, items, self.form, vote=vote)
        finding_at = dict(zip(places, found, strict=True))
        return [finding_at[place] for place in range(len(answers))]

    def _mean_grade(self, verdicts: Sequence[Any]) -> float:
        return sum(one["score"] for one in verdicts) / len(verdicts) / self.highest

    def _valued(
        self, grades: Sequence[float], stored: ScoredAnswers, completion: Completion, cost: float
    ) -> Score:
        length = min(1.0, len(completion.token_ids) / self.length_tokens)
        alignment = measure(grades, stored.gold_scores, length)
        self._measured.append(alignment)
        penalty = self.coefficients["lambda_len"] * alignment.length
        bonus = self.coefficients["lambda_info"] * alignment.information
        defense = self.coefficients["lambda_defense"] * alignment.defense
        shown = ", ".join(f"{grade * self.highest:.3g}" for grade in grades)
        detail = (
            f"correlation {alignment.correlation:.3f} - length {penalty:.3f} + information "
            f"{bonus:.3f} - defense {defense:.3f}; grades {shown} of {self.highest}"
        )
        value = alignment.correlation - penalty + bonus - defense
        return Score(value=value, detail=detail, cost=cost)


def measure(scores: Sequence[float], gold_scores: Sequence[float], length: float) -> Alignment:
    """The parts of a value from the judge's scores, 0 to 1, and the share of the full length."""
    mean, deviation = float(np.mean(scores)), float(np.std(scores))
    return Alignment(
        correlation=rank_correlation(scores, gold_scores),
        length=length,
        information=4 * mean * (1 - mean),
        defense=max(0.0, 1 - deviation / ENOUGH_DEVIATION),
    )


def rank_correlation(scores: Sequence[float], gold_scores: Sequence[float]) -> float:
    """Spearman's, from -1 to 1; 0 where one side tells nothing apart."""
    if len(set(scores)) == 1 or len(set(gold_scores)) == 1:
        return 0.0
    return float(np.corrcoef(average_ranks(scores), average_ranks(gold_scores))[0, 1])


def average_ranks(values: Sequence[float]) -> np.ndarray:
    """The places in ascending order from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


def _first_failure(scores: Sequence[Score]) -> Score:
    place, failed = next((i, one) for i, one in enumerate(scores, start=1) if not one.is_ok)
    return replace(failed, detail=f"stored answer {place} of {len(scores)}: {failed.detail}")


def _refusal(name: str, rule: str, value: float) -> ValueError:
    variable = RubricAlignmentReward.overridden_by_environment.get(name)
    where = f", and the environment variable {variable} where it is set" if variable else ""
    return UserError(
        f"{name} must be {rule}, got {value}. "
        f"Set {name} in the init_args of RubricAlignmentReward{where}."
    )
