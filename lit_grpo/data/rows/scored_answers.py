"""Read the stored answers of a row and their gold scores, in whatever form the file holds them.

A row that cannot be compared is refused; a missing score is never filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from lit_grpo.types import UserError
from lit_grpo.types.json_text import parse_json

MIN_ANSWERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswers:
    """Two or more answers to one question, with the quality of each."""

    answers: tuple[str, ...]
    gold_scores: tuple[float, ...]
    """One finite score per answer."""

    @property
    def has_contrast(self) -> bool:
        """Whether one answer is better than another."""
        return min(self.gold_scores) < max(self.gold_scores)

    @property
    def best(self) -> str:
        return self.answers[self.gold_scores.index(max(self.gold_scores))]

    @property
    def worst(self) -> str:
        return self.answers[self.gold_scores.index(min(self.gold_scores))]


def read_scored_answers(
    columns: Mapping[str, Any], answers_column: str, gold_column: str
) -> ScoredAnswers:
    """Read two columns of a row: lists, arrays, or the JSON text of a list.

    Raises:
        UserError: the columns cannot be read; the message says why.
    """
    answers = _as_list(columns, answers_column)
    gold_scores = _as_list(columns, gold_column)
    if len(answers) != len(gold_scores):
        raise UserError(
            f"{gold_column} holds {len(gold_scores)} values but {answers_column} holds "
            f"{len(answers)}"
        )
    if len(answers) < MIN_ANSWERS:
        raise UserError(
            f"{answers_column} holds {len(answers)}; a comparison needs at least {MIN_ANSWERS}"
        )
    for index, (answer, gold) in enumerate(zip(answers, gold_scores, strict=True)):
        if not isinstance(answer, str):
            raise UserError(f"{answers_column}[{index}] is {answer!r}, not text")
        if not _is_number(gold):
            raise UserError(f"{gold_column}[{index}] is {gold!r}, not a finite number")
    return ScoredAnswers(answers=tuple(answers), gold_scores=tuple(map(float, gold_scores)))


def _as_list(columns: Mapping[str, Any], name: str) -> list[Any]:
    if name not in columns:
        raise UserError(f"no column {name}")
    value = columns[name]
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise UserError(f"{name} is text but not JSON ({error})") from None
    if hasattr(value, "tolist"):  # pandas reads lists from parquet as arrays
        value = value.tolist()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise UserError(f"{name} is null")
    if not isinstance(value, list | tuple):
        raise UserError(f"{name} is not a list but a {type(value).__name__}")
    return list(value)


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that is not a float
        return False
