"""What rewards that ask a judge have in common: its life, its books, votes and failures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed

from lit_grpo.judge import Examiner, Finding, Form, Item, Judge, JudgeTemplate, Verdict
from lit_grpo.rewards.reward import Reward
from lit_grpo.types import Measurements, Prompt, Score, UserError

NUM_SHOWN = 5


class JudgedReward(Reward):
    """Asks a language model for verdicts. A subclass says on what, and what they are worth.

    The judge tries again by itself, within ``judge.limits``: what then still has no verdict has an
    outcome and no value, and ``on_error`` (mask, drop_group or raise) decides on its row.

    Args:
        judge: Which model, where, and what it may use up.
        template: A template that ships, or the path of one of your own.
        votes: Independent opinions on each item; their mean or majority counts.
    """

    template_variables: ClassVar[tuple[str, ...]]
    """What a template is given."""
    template_needs: ClassVar[tuple[str, ...]]
    """What it must use."""
    votes_differ: ClassVar[bool] = False
    """Whether votes ask differently, so that a temperature of 0 gives several opinions."""
    items_per_call: int = 1

    def __init__(self, judge: Judge, template: str, votes: int = 1, **settings: Any) -> None:
        super().__init__(**settings)
        if self.on_error == "retry":
            raise UserError(
                "on_error must be mask, drop_group or raise where a judge is asked, got retry (it "
                "tries again by itself). Set judge.limits.num_retries and another on_error."
            )
        if votes < 1 or (votes > 1 and judge.temperature == 0 and not self.votes_differ):
            raise UserError(
                f"votes must be >= 1, and 1 with a temperature of 0, got {votes} with "
                f"{judge.temperature} (the opinions would be the same). Set votes, or "
                "judge.temperature above 0 or to null."
            )
        self.judge = judge
        self.votes = votes
        self.template = JudgeTemplate(template, self.template_variables, self.template_needs)
        self._examiner: Examiner | None = None
        self._agreements: list[float] = []

    async def start(self) -> None:
        """Opens the judge and asks it a first question.

        Raises:
            ValueError: an address, a key or a deployment that is missing or wrong.
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
        if self._examiner is None:
            raise RuntimeError(f"{self.name} is not started; call start() of its suite first")
        return self._examiner

    def observe(self) -> Measurements:
        if self._examiner is None:
            return Measurements()
        agreements, self._agreements = self._agreements, []
        means = {"judge/agreement": agreements} if agreements else {}
        return replace(self._examiner.observe(), means=means)

    def state_dict(self) -> dict[str, Any]:
        if self._examiner is None:
            return {}
        return {"spent_usd": _over_ranks(self._examiner.client.budget.spent_usd)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.examiner.client.budget.resume(state.get("spent_usd", 0.0))

    async def opinions(
        self, context: Mapping[str, Any], items: Sequence[Item], form: Form
    ) -> list[tuple[Finding, ...]]:
        """For each item what came of each vote on it."""
        votes = (
            self.examiner.examine(context, items, form, vote=vote) for vote in range(self.votes)
        )
        return list(zip(*await asyncio.gather(*votes), strict=True))

    def as_score(
        self,
        findings: Sequence[Finding],
        value_of: Callable[[Sequence[Verdict]], float],
        key: Callable[[Verdict], Hashable],
    ) -> Score:
        """The votes on one item as a score; those that failed do not vote.

        Args:
            key: What must be equal for two votes to agree.
        """
        verdicts = [one.verdict for one in findings if one.verdict is not None]
        cost = sum(one.cost for one in findings)
        if not verdicts:
            return failed_score(findings, cost)
        if len(verdicts) > 1:
            self._agreements.append(agreement([key(verdict) for verdict in verdicts]))
        detail = str(verdicts[0].get("explanation", ""))
        return Score(value=value_of(verdicts), detail=detail, cost=cost)


def unreadable_rows(prompts: Sequence[Prompt], read: Callable[[Prompt], object]) -> dict[str, str]:
    """The ids of the rows that cannot be read, and why not; ``read`` raises a ValueError."""
    problems = {}
    for prompt in prompts:
        try:
            read(prompt)
        except ValueError as error:
            problems[prompt.id] = str(error)
    return problems


def show_problems(problems: Mapping[str, str]) -> str:
    """The first few of them."""
    return "; ".join(f"{id}: {why}" for id, why in list(problems.items())[:NUM_SHOWN])


def failed_score(findings: Sequence[Finding], cost: float) -> Score:
    """The first failure among findings, as a score without a value."""
    failure = next(one.failure for one in findings if one.failure is not None)
    return Score(value=None, outcome=failure.outcome, detail=failure.detail, cost=cost)


def agreement(votes: Sequence[Hashable]) -> float:
    """The share of votes that are the most common one."""
    return Counter(votes).most_common(1)[0][1] / len(votes)


def question_of(prompt: Prompt) -> str:
    """What was asked, as a judge should read it: without the marks of a chat template."""
    if prompt.messages is None:
        return prompt.text
    if len(prompt.messages) == 1:
        return prompt.messages[0]["content"]
    return "\n\n".join(f"{one['role']}: {one['content']}" for one in prompt.messages)


def _over_ranks(value: float) -> float:
    """The sum over the processes of the job; all of them must call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return sum(values)
