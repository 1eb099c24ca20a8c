"""A reward from the grades of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_grpo.judge import Judge
from lit_grpo.judge.reply import Form, Grade, Text
from lit_grpo.rewards.judged.base import JudgedReward, question_of
from lit_grpo.rewards.reward import setting_key
from lit_grpo.types import Completion, Prompt, Score, check_range
from lit_grpo.types.field_types import checks_types


@checks_types
class JudgeReward(JudgedReward):
    """A judge's grade from 0 to ``highest``, scaled to a value from 0 to 1.

    Args:
        judge: The model, its address and its limits.
        template: Name of a bundled template, or the path of your own. Its variables are
            ``question``, ``reference`` (none if there is no gold answer), ``highest`` and
            ``items``, each with ``id`` and ``answer``.
        votes: Number of independent votes on each completion; their mean counts.
        highest: The best grade.
        completions_per_call: Maximum number of completions of a prompt in a call. A higher number
            saves calls, but the judge then sees completions next to each other.
        show_reference: Whether to show the judge the gold answer, if the row has one.
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
        check_range(setting_key(self, "highest"), highest, at_least=1)
        check_range(setting_key(self, "completions_per_call"), completions_per_call, at_least=1)
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
        votes = await self.ask_votes(context, items, self.form)
        return [self.score_grades(findings, self.highest) for findings in votes]
