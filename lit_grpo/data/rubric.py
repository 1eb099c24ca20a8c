"""Prompts that ask the policy for a rubric, optionally with excerpts of a good and a bad answer.

Gold scores are never shown to the policy. How a rubric is scored is up to the reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from lit_grpo.data.module import Split
from lit_grpo.data.prompt_data import PromptData
from lit_grpo.data.rows.columns import list_rows
from lit_grpo.data.rows.mapped import MappedRows
from lit_grpo.data.rows.scored_answers import ScoredAnswers, read_scored_answers
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import UserError, check_range

RUBRIC_TEMPLATE = """\
Write a rubric for grading answers to the question below: a short list of criteria, each of which \
can be checked in the answer itself.

Question:
{{ question }}
{%- if good_excerpt %}

A good answer to it begins:
{{ good_excerpt }}

A bad answer to it begins:
{{ bad_excerpt }}

Find what makes one better than the other. The rubric must work for any answer, so do not \
describe or quote these two.
{%- endif %}
"""


class RubricData(PromptData):
    """Prompts that ask for a rubric by which stored answers will be graded.

    Args:
        template: jinja2 template over the columns of the row, ``good_excerpt`` and
            ``bad_excerpt``. Both excerpts are null without ``use_contrastive`` and where no answer
            is better than another. Null means the built-in template, which asks for a rubric for
            the column ``question``.
        use_contrastive: Show the policy how the best and the worst stored answer begin.
        excerpt_characters: Maximum length of an excerpt.
        answers_column: Column with the stored answers: a list of texts, or the JSON text of one.
        gold_column: Column with their gold scores: a list of numbers, or the JSON text of one.
        require_answer: Refuse rows without a gold answer. Off by default because a rubric is
            not compared with one.
        settings: Further settings of PromptData.
    """

    overridden_by_environment: ClassVar[Mapping[str, str]] = {
        "use_contrastive": "REWARD_USE_CONTRASTIVE"
    }

    def __init__(
        self,
        train: str | list[str] | None = None,
        validation: str | list[str] | None = None,
        test: str | list[str] | None = None,
        *,
        template: str | None = None,
        use_contrastive: bool = False,
        excerpt_characters: int = 400,
        answers_column: str = "answers",
        gold_column: str = "gold_scores",
        require_answer: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(
            *(train, validation, test),
            template=RUBRIC_TEMPLATE if template is None else template,
            require_answer=require_answer,
            **settings,
        )
        check_range(
            "data.excerpt_characters",
            excerpt_characters,
            at_least=1,
            why="to show no excerpts, set data.use_contrastive: false",
        )
        self.use_contrastive = use_contrastive
        self.excerpt_characters = excerpt_characters
        self.answers_column = answers_column
        self.gold_column = gold_column

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split, each with its two excerpts as further columns.

        Raises:
            UserError: excerpts are shown, and the answers or gold scores of a row cannot be read.
        """
        rows = super().rows(split)
        if isinstance(rows, MappedRows):
            return rows.then(self._with_excerpts)
        scored = self._scored_answers(rows) if self.use_contrastive else [None] * len(rows)
        return [
            replace(row, columns={**row.columns, **self._excerpts(answers)})
            for row, answers in zip(rows, scored, strict=True)
        ]

    def _with_excerpts(self, row: Row) -> Row:
        answers = self._scored_answers([row])[0] if self.use_contrastive else None
        return replace(row, columns={**row.columns, **self._excerpts(answers)})

    def _scored_answers(self, rows: Sequence[Row]) -> list[ScoredAnswers]:
        scored, refused, reason = [], [], ""
        for row in rows:
            try:
                scored.append(
                    read_scored_answers(row.columns, self.answers_column, self.gold_column)
                )
            except ValueError as error:
                refused.append(row)
                reason = reason or str(error)
        if refused:
            raise UserError(
                f"use_contrastive needs answers and gold scores in every row, but {len(refused)} "
                f"of {len(rows)} have none that can be read: {list_rows(refused)} (the first: "
                f"{reason}). Fill or drop these rows, set data.answers_column and "
                "data.gold_column, or data.use_contrastive: false."
            )
        return scored

    def _excerpts(self, answers: ScoredAnswers | None) -> dict[str, str | None]:
        if answers is None or not answers.has_contrast:
            return {"good_excerpt": None, "bad_excerpt": None}
        return {"good_excerpt": self._cut(answers.best), "bad_excerpt": self._cut(answers.worst)}

    def _cut(self, answer: str) -> str:
        limit = self.excerpt_characters
        return answer if len(answer) <= limit else answer[:limit].rstrip() + " …"
