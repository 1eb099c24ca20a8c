"""A reward by the grade that a language model gives. It asks; it never grades by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_grpo.judge import Form, Grade, Judge, Text
from lit_grpo.rewards.judged.base import JudgedReward, question_of
from lit_grpo.types import Completion, Prompt, Score, UserError


class JudgeReward(JudgedReward):
    """A grade from 0 to ``highest`` as a value from 0 to 1.

    Args:
        judge: Which model, where, and what it may use up.
        template: A template that ships, or the path of one of your own, which is given
            ``question``, ``reference`` (none without one), ``highest`` and ``items``, each with
            ``id`` and ``answer``.
        votes: Independent opinions on each completion; their mean counts.
        highest: The best grade.
        completions_per_call: At most so many completions of a prompt share a call. It saves calls,
            and the judge sees them beside each other.
        show_reference: Show the judge the gold answer of a row that has one.
    """

    template_variables = ("question", "reference", "highest", "items")
    template_needs = ("question", "items")

    def __init__(
        self,
        judge: Judge,
        template: str = "grade",
        votes: int = 1,
        highest: int = 10,
        completions_per_call: int = 1,
        show_reference: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(judge, template, votes, **settings)
        counts = {"highest": highest, "completions_per_call": completions_per_call}
        for name, value in counts.items():
            if value < 1:
                raise UserError(
                    f"{name} must be >= 1, got {value}. Set {name} in the init_args of JudgeReward."
                )
        self.highest = highest
        self.items_per_call = completions_per_call
        self.show_reference = show_reference
        self.form = Form({"explanation": Text(), "score": Grade(highest)})

    @property
    def siblings_per_call(self) -> int:
        return self.items_per_call

    async def score_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Sequence[Score]:
        context = {
            "question": question_of(prompt),
            "reference": prompt.answer if self.show_reference else None,
            "highest": self.highest,
        }
        items = [{"answer": completion.text} for completion in completions]
        return [
            self.as_score(findings, self._value, lambda verdict: verdict["score"])
            for findings in await self.opinions(context, items, self.form)
        ]

    def _value(self, verdicts: Sequence[Any]) -> float:
        return sum(one["score"] for one in verdicts) / len(verdicts) / self.highest
