"""A reward for rubrics that the policy writes.

A judge grades the stored answers of a row by the rubric. The reward grows as its order gets closer
to the order of the gold scores. The judge sees the rubric and the answers, but no gold scores.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lit_grpo.judge import Judge
from lit_grpo.judge.examiner import JudgeResult
from lit_grpo.judge.reply import Form, Grade, Text
from lit_grpo.rewards.judged.base import JudgedReward, show_problems, unreadable_rows
from lit_grpo.rewards.reward import setting_key
from lit_grpo.types import (
    Completion,
    Measurements,
    Outcome,
    Prompt,
    Score,
    UserError,
    check_range,
    setting_error,
)
from lit_grpo.types.field_types import checks_types

if TYPE_CHECKING:
    from lit_grpo.data.rows.scored_answers import ScoredAnswers

ENOUGH_DEVIATION = 0.2
"""Standard deviation of the scores (0 to 1) below which a rubric barely distinguishes answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The parts of the value of one rubric, before their coefficients."""

    correlation: float
    """-1 to 1."""
    length: float
    """0 to 1."""
    information: float
    """0 to 1."""
    defense: float
    """0 to 1."""


@checks_types
class RubricAlignmentReward(JudgedReward):
    """How well a rubric orders the stored answers of its row.

    The judge grades each stored answer by the rubric. With s the grades divided by ``highest``, p
    their mean and d their population standard deviation, the value of the rubric is::

        rank correlation of s with the gold scores (0 where all s are equal)
        - lambda_len     * min(1, tokens of the rubric / length_tokens)
        + lambda_info    * 4 p (1 - p)
        - lambda_defense * max(0, 1 - d / 0.2)

    The policy's reasoning before the rubric is not part of it: the judge does not see it, and its
    tokens are not counted, unless ``reasoning`` is ``keep``.

    A rubric has no value if one of the answers got no grade, or if all gold scores are equal. For
    a blank rubric every grade is 0, and the judge is not asked.

    Args:
        judge: The model, its address and its limits.
        template: Name of a bundled template, or the path of your own. Its variables are
            ``question``, ``rubric``, ``highest`` and ``items``, each with ``id`` and ``answer``.
        votes: Number of independent votes on each answer; their mean counts.
        question_column: Column with the question that the stored answers reply to. The prompt is
            not used, since it may show which answers are good.
        answers_column: Column with the stored answers: a list of texts, or a list in JSON.
        gold_column: Column with their gold scores: a list of numbers, or a list in JSON.
        lambda_len: Coefficient of the length penalty.
        lambda_info: Coefficient of the information bonus, which is greatest for a mean of 0.5.
        lambda_defense: Coefficient of the penalty for grades that are nearly equal. Keep it above
            ``lambda_info``, since otherwise grading all answers the same would pay off.
        length_tokens: Length of a rubric, in tokens, at which the length penalty is full.
        highest: The best grade.
        answers_per_call: Maximum number of stored answers in a call. A higher number saves calls,
            but the judge then sees answers next to each other.
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
            if not 0 <= coefficient < float("inf"):
                why = f"it comes from {self.overridden_by_environment[name]} where it is set"
                raise setting_error(setting_key(self, name), ">= 0 and finite", coefficient, why)
        check_range(setting_key(self, "length_tokens"), length_tokens, at_least=1)
        check_range(setting_key(self, "highest"), highest, at_least=1)
        check_range(setting_key(self, "answers_per_call"), answers_per_call, at_least=1)
        self.question_column = question_column
        self.answers_column = answers_column
        self.gold_column = gold_column
        self.length_tokens = length_tokens
        self.highest = highest
        self.items_per_call = answers_per_call
        self.form = Form({"explanation": Text(), "score": Grade(highest)})
        self._measured: list[Alignment] = []

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check that every row has a question, answers and gold scores.

        Raises:
            UserError: some rows lack one of them, or they cannot be read.
        """
        if problems := unreadable_rows(prompts, self._read):
            shown = show_problems(problems)
            raise UserError(
                f"every row must have a question in column {self.question_column!r}, answers in "
                f"{self.answers_column!r} and a gold score for each in {self.gold_column!r}; "
                f"{len(problems)} of {len(prompts)} do not: {shown} (nothing could be compared). "
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
            raise ValueError(f"{self.question_column} is {question!r}, not a string")
        # Not at the top, since `lit_grpo.data` imports Lightning, which slows worker processes.
        from lit_grpo.data.rows.scored_answers import read_scored_answers

        return question, read_scored_answers(prompt.columns, self.answers_column, self.gold_column)

    async def _grade(self, context: Mapping[str, Any], answers: Sequence[str]) -> list[Score]:
        """Return the grade of each answer, from 0 to 1, as scores."""
        votes = await asyncio.gather(
            *(self._ask(context, answers, vote) for vote in range(self.votes))
        )
        return [self.score_grades(one, self.highest) for one in zip(*votes, strict=True)]

    async def _ask(
        self, context: Mapping[str, Any], answers: Sequence[str], vote: int
    ) -> list[JudgeResult]:
        """Return one vote on each answer, in order, though the judge sees them in random order."""
        order = list(range(len(answers)))
        # Shuffled, since files often have the best answer first and the policy may exploit that.
        # Seeded by the rubric, so the same question is found in a cache.
        random.Random(repr((vote, context["rubric"]))).shuffle(order)
        items = [{"answer": answers[index]} for index in order]
        found = await self.examiner.examine(context, items, self.form, vote=vote)
        finding_of = dict(zip(order, found, strict=True))
        return [finding_of[index] for index in range(len(answers))]

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
    """Compute the parts of a value from the judge's scores (0 to 1) and the length (0 to 1)."""
    mean, deviation = float(np.mean(scores)), float(np.std(scores))
    return Alignment(
        correlation=rank_correlation(scores, gold_scores),
        length=length,
        information=4 * mean * (1 - mean),
        defense=max(0.0, 1 - deviation / ENOUGH_DEVIATION),
    )


def rank_correlation(scores: Sequence[float], gold_scores: Sequence[float]) -> float:
    """Return Spearman's rank correlation, from -1 to 1; 0 if all values of one side are equal."""
    if len(set(scores)) == 1 or len(set(gold_scores)) == 1:
        return 0.0
    return float(np.corrcoef(average_ranks(scores), average_ranks(gold_scores))[0, 1])


def average_ranks(values: Sequence[float]) -> np.ndarray:
    """Return ascending ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


def _first_failure(scores: Sequence[Score]) -> Score:
    number, failed = next((i, one) for i, one in enumerate(scores, start=1) if not one.is_ok)
    return replace(failed, detail=f"stored answer {number} of {len(scores)}: {failed.detail}")
