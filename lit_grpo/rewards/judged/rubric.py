"""A reward by the criteria of a row's rubric that a language model finds met.

The judge decides on each criterion; the points are the row's, and the sum is done here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.judge import Finding, Form, Judge, Text, YesNo
from lit_grpo.rewards.judged.base import (
    JudgedReward,
    agreement,
    failed_score,
    question_of,
    show_problems,
    unreadable_rows,
)
from lit_grpo.types import Completion, Outcome, Prompt, Score, UserError


@dataclass(frozen=True, slots=True)
class Criterion:
    """One line of a rubric; a fault has points below 0."""

    text: str
    points: float


class RubricReward(JudgedReward):
    """The points of the criteria that are met over the sum of the positive points.

    Source: HealthBench, arXiv 2505.08775 section 2: points of met criteria, negative ones
    included, over all positive points, not clipped. A rubric without positive points says nothing.

    Args:
        judge: Which model, where, and what it may use up.
        template: A template that ships, or the path of one of your own, which is given
            ``question``, ``answer`` and ``items``, each with ``id`` and ``criterion``.
        votes: Independent opinions on each criterion; the majority counts, and a tie is not met.
        column: The column with a row's rubric: a list of ``{criterion, points}``, or JSON of one.
        criteria_per_call: At most so many criteria share a call.
        clip: Keep the value within 0 and 1.
    """

    template_variables = ("question", "answer", "items")
    template_needs = ("answer", "items")
    form = Form({"explanation": Text(), "criteria_met": YesNo()})

    def __init__(
        self,
        judge: Judge,
        template: str = "rubric",
        votes: int = 1,
        column: str = "rubric",
        criteria_per_call: int = 1,
        clip: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(judge, template, votes, **settings)
        if criteria_per_call < 1:
            raise UserError(
                f"criteria_per_call must be >= 1, got {criteria_per_call}. "
                "Set criteria_per_call in the init_args of RubricReward."
            )
        self.column = column
        self.items_per_call = criteria_per_call
        self.clip = clip

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuses rows without a rubric that can be read."""
        if problems := unreadable_rows(
            prompts, lambda one: read_rubric(one.columns.get(self.column))
        ):
            shown = show_problems(problems)
            raise UserError(
                f"every row must have a rubric in column {self.column!r}, {len(problems)} of "
                f"{len(prompts)} have none that can be read: {shown} (nothing could be scored). "
                "Set column of RubricReward, or drop these rows."
            )

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        rubric = read_rubric(prompt.columns.get(self.column))
        available = sum(max(0.0, one.points) for one in rubric)
        if not available:
            detail = "the rubric has no positive points"
            return Score(value=None, outcome=Outcome.ABSTAIN, detail=detail)
        context = {"question": question_of(prompt), "answer": completion.text}
        items = [{"criterion": one.text} for one in rubric]
        return self._summed(rubric, available, await self.opinions(context, items, self.form))

    def _summed(
        self,
        rubric: Sequence[Criterion],
        available: float,
        findings: Sequence[Sequence[Finding]],
    ) -> Score:
        cost = sum(one.cost for votes in findings for one in votes)
        decided = []
        for votes in findings:
            opinions = [one.verdict["criteria_met"] for one in votes if one.verdict is not None]
            if not opinions:
                return failed_score(votes, cost)
            if len(opinions) > 1:
                self._agreements.append(agreement(opinions))
            decided.append(2 * sum(opinions) > len(opinions))
        points = sum(one.points for one, met in zip(rubric, decided, strict=True) if met)
        value = points / available
        detail = f"{sum(decided)} of {len(rubric)} criteria met, {points:g} of {available:g} points"
        return Score(
            value=min(1.0, max(0.0, value)) if self.clip else value, detail=detail, cost=cost
        )


def read_rubric(column: Any) -> list[Criterion]:
    """The criteria of a row.

    Raises:
        ValueError: why they cannot be read.
    """
    value = json.loads(column) if isinstance(column, str) else column
    if not isinstance(value, Collection) or isinstance(value, Mapping) or not len(value):
        raise UserError("no criteria")
    try:
        rubric = [Criterion(str(one["criterion"]), float(one["points"])) for one in value]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"a criterion needs 'criterion' and 'points' ({error!r})") from None
    if not all(math.isfinite(one.points) for one in rubric):
        raise UserError("points must be finite")
    return rubric
