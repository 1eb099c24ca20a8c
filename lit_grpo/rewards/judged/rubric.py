"""A reward from the criteria of a row's rubric that a completion meets.

A language model decides whether each criterion is met; the points are summed here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.judge import Judge
from lit_grpo.judge.examiner import JudgeResult
from lit_grpo.judge.reply import Form, Text, YesNo
from lit_grpo.rewards.judged.base import (
    JudgedReward,
    agreement,
    failed_score,
    question_of,
    show_problems,
    unreadable_rows,
)
from lit_grpo.rewards.reward import setting_key
from lit_grpo.types import Completion, Outcome, Prompt, Score, UserError, check_range
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.json_text import parse_json


@dataclass(frozen=True, slots=True)
class Criterion:
    """One criterion of a rubric."""

    text: str
    points: float
    """Negative if the criterion describes a fault."""


@checks_types
class RubricReward(JudgedReward):
    """The points of the criteria that are met, divided by the sum of the positive points.

    Source: HealthBench, arXiv 2505.08775 section 2. Met criteria with negative points count, and
    the value is not clipped. For a rubric without positive points the reward abstains.

    Args:
        judge: The model, its address and its limits.
        template: Name of a bundled template, or the path of your own. Its variables are
            ``question``, ``answer`` and ``items``, each with ``id`` and ``criterion``.
        votes: Number of independent votes on each criterion. The majority counts; a tie is not met.
        column: Column with the rubric: a list of ``{criterion, points}``, or a list in JSON.
        criteria_per_call: Maximum number of criteria in a call.
        clip: Whether to clip the value to the range from 0 to 1.
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
        check_range(setting_key(self, "criteria_per_call"), criteria_per_call, at_least=1)
        self.column = column
        self.items_per_call = criteria_per_call
        self.clip = clip

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check that every row has a readable rubric.

        Raises:
            UserError: some rows have none.
        """
        if problems := unreadable_rows(
            prompts, lambda one: read_rubric(one.columns.get(self.column))
        ):
            shown = show_problems(problems)
            raise UserError(
                f"every row must have a rubric in column {self.column!r}; {len(problems)} of "
                f"{len(prompts)} have no readable one: {shown} (they could not be scored). "
                f"Set {setting_key(self, 'column')}, or drop these rows."
            )

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        rubric = read_rubric(prompt.columns.get(self.column))
        available = sum(max(0.0, one.points) for one in rubric)
        if not available:
            detail = "the rubric has no positive points"
            return Score(value=None, outcome=Outcome.ABSTAIN, detail=detail)
        context = {"question": question_of(prompt), "answer": completion.text}
        items = [{"criterion": one.text} for one in rubric]
        return self._sum_points(rubric, available, await self.ask_votes(context, items, self.form))

    def _sum_points(
        self,
        rubric: Sequence[Criterion],
        available: float,
        results: Sequence[Sequence[JudgeResult]],
    ) -> Score:
        cost = sum(one.cost for votes in results for one in votes)
        is_met = []
        for votes in results:
            decisions = [one.verdict["criteria_met"] for one in votes if one.verdict is not None]
            if not decisions:
                return failed_score(votes, cost)
            if len(decisions) > 1:
                self._agreements.append(agreement(decisions))
            is_met.append(2 * sum(decisions) > len(decisions))
        points = sum(one.points for one, met in zip(rubric, is_met, strict=True) if met)
        value = points / available
        detail = f"{sum(is_met)} of {len(rubric)} criteria met, {points:g} of {available:g} points"
        return Score(
            value=min(1.0, max(0.0, value)) if self.clip else value, detail=detail, cost=cost
        )


def read_rubric(column: Any) -> list[Criterion]:
    """Read the criteria of a row.

    Raises:
        ValueError: they cannot be read; the message says why.
    """
    value = parse_json(column) if isinstance(column, str) else column
    if not isinstance(value, Collection) or isinstance(value, Mapping) or not len(value):
        raise ValueError("no criteria")
    try:
        rubric = [Criterion(str(one["criterion"]), float(one["points"])) for one in value]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a criterion needs 'criterion' and 'points' ({error!r})") from None
    if not all(math.isfinite(one.points) for one in rubric):
        raise ValueError("points must be finite")
    return rubric
