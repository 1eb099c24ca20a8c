"""The base class of rewards from a judge: its start and end, metrics, cost, votes and failures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from lit_grpo.distributed.ranks import gather_objects
from lit_grpo.judge import Judge
from lit_grpo.judge.examiner import Examiner, Item, JudgeResult
from lit_grpo.judge.reply import Form
from lit_grpo.judge.template import JudgeTemplate
from lit_grpo.rewards.reward import Reward, setting_key, started
from lit_grpo.types import Measurements, Prompt, Score, UserError, check_range
from lit_grpo.types.field_types import checks_types

NUM_SHOWN = 5


@checks_types
class JudgedReward(Reward):
    """Ask a language model for verdicts. A subclass defines the items and their values.

    Unless ``reasoning`` is ``keep``, the judge sees the answer without the policy's reasoning.

    The judge client retries within ``judge.limits``. A row without a verdict after that has an
    outcome but no value, and ``on_error`` (mask, drop_group or raise) applies to it.

    Args:
        judge: The model, its address and its limits.
        template: Name of a bundled template, or the path of your own.
        votes: Number of independent votes on each item; their mean or majority counts.
    """

    template_variables: ClassVar[tuple[str, ...]]
    """Variables that the template may use."""
    template_needs: ClassVar[tuple[str, ...]]
    """Variables that the template must use."""
    reasoning = "strip"
    votes_differ: ClassVar[bool] = False
    """Whether each vote has a different prompt, which lets votes differ even at temperature 0."""
    items_per_call: int = 1
    """Maximum number of items in a call."""

    outlasts_steps = True

    def __init__(self, judge: Judge, template: str, votes: int = 1, **settings: Any) -> None:
        super().__init__(**settings)
        if self.on_error == "retry":
            raise UserError(
                "on_error must be mask, drop_group or raise with a judge, got retry (the judge "
                "client itself retries). Set judge.limits.num_retries and a different on_error."
            )
        check_range(setting_key(self, "votes"), votes, at_least=1)
        if not self.votes_differ:
            judge.check_votes(setting_key(self, "votes"), votes)
        self.judge = judge
        self.votes = votes
        self.template = JudgeTemplate(template, self.template_variables, self.template_needs)
        self._examiner: Examiner | None = None
        self._agreements: list[float] = []

    async def start(self) -> None:
        """Connect to the judge and ask a first question.

        Raises:
            UserError: an address, a key or a deployment is missing or wrong.
        """
        self._examiner = Examiner(
            judge=self.judge, template=self.template, items_per_call=self.items_per_call
        )
        try:
            await self._examiner.client.check_access()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        examiner, self._examiner = self._examiner, None
        if examiner is not None:
            await examiner.close()

    @property
    def examiner(self) -> Examiner:
        return started(self._examiner, self)

    def observe(self) -> Measurements:
        if self._examiner is None:
            return Measurements()
        agreements, self._agreements = self._agreements, []
        means = {"judge/agreement": agreements} if agreements else {}
        return replace(self._examiner.observe(), means=means)

    def state_dict(self) -> dict[str, Any]:
        if self._examiner is None:
            return {}
        return {"spent_usd": sum(gather_objects(self._examiner.client.budget.spent_usd))}

    def record_spending(self, run_dir: Path) -> None:
        self.examiner.client.record_spending(run_dir)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.examiner.client.budget.resume(state.get("spent_usd", 0.0))

    async def ask_votes(
        self, context: Mapping[str, Any], items: Sequence[Item], form: Form
    ) -> list[tuple[JudgeResult, ...]]:
        """Return the results of all votes on each item."""
        votes = (
            self.examiner.examine(context, items, form, vote=vote) for vote in range(self.votes)
        )
        return list(zip(*await asyncio.gather(*votes), strict=True))

    def score_grades(self, results: Sequence[JudgeResult], highest: int) -> Score:
        """Return the mean grade of the votes on one item, from 0 to 1, without failed votes.

        If all votes failed, the score has no value.
        """
        verdicts = [one.verdict for one in results if one.verdict is not None]
        cost = sum(one.cost for one in results)
        if not verdicts:
            return failed_score(results, cost)
        grades: list[int] = [verdict["score"] for verdict in verdicts]
        if len(grades) > 1:
            self._agreements.append(agreement(grades))
        detail = str(verdicts[0].get("explanation", ""))
        return Score(value=sum(grades) / len(grades) / highest, detail=detail, cost=cost)


def unreadable_rows(prompts: Sequence[Prompt], read: Callable[[Prompt], object]) -> dict[str, str]:
    """Return id -> problem for the rows on which ``read`` raises a ValueError."""
    problems = {}
    for prompt in prompts:
        try:
            read(prompt)
        except ValueError as error:
            problems[prompt.id] = str(error)
    return problems


def show_problems(problems: Mapping[str, str]) -> str:
    """Return the first few problems in one line."""
    return "; ".join(f"{id}: {why}" for id, why in list(problems.items())[:NUM_SHOWN])


def failed_score(results: Sequence[JudgeResult], cost: float) -> Score:
    """Return the first failure among the results, as a score without a value."""
    failure = next(one.failure for one in results if one.failure is not None)
    return Score(value=None, outcome=failure.outcome, detail=failure.detail, cost=cost)


def agreement(votes: Sequence[Hashable]) -> float:
    """Return the share of the most common vote."""
    return Counter(votes).most_common(1)[0][1] / len(votes)


def question_of(prompt: Prompt) -> str:
    """Return the question as a judge should read it, without chat template markup."""
    if prompt.messages is None:
        return prompt.text
    if len(prompt.messages) == 1:
        return prompt.messages[0]["content"]
    return "\n\n".join(f"{one['role']}: {one['content']}" for one in prompt.messages)
