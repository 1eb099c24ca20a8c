"""Join the gold scores of stored answers from the cache to the rows."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lit_grpo.cli.prepare.recipe import Recipe, Verifier
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.types import UserError
from lit_grpo.types.settings import list_some

MIN_ANSWERS = 2
"""Stored answers that a row needs: one alone cannot be compared."""
QUESTION_DIGITS = 16
CHECK_FORMAT = 2
"""Changes when the program makes other answers to the same row."""
_IDS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Answers to a verifiable row, right and wrong ones, with the values a program gave them."""

    answers: tuple[str, ...]
    gold_scores: tuple[float, ...]


class GoldCache(Protocol):
    """Votes on the quality of stored answers."""

    def votes(self, key: str) -> Mapping[int, int]:
        """Return the grades of an answer by the number of the vote; see `vote_key`."""
        ...

    def checked(self, key: str) -> Checked | None:
        """Return the answers to a verifiable row; see `check_key`."""
        ...


class NoCache:
    """An empty cache, used if none is given."""

    def votes(self, key: str) -> Mapping[int, int]:
        return {}

    def checked(self, key: str) -> Checked | None:
        return None


def vote_key(row: PreparedRow, answer: str) -> str:
    """Return 32 hexadecimal digits for what a judge is asked about an answer.

    The first `QUESTION_DIGITS` are the same for all answers to a question.
    """
    asked = _asked(row)
    return _digest(asked)[:QUESTION_DIGITS] + _digest([*asked, answer])[QUESTION_DIGITS:]


def check_key(row: PreparedRow, verifier: Verifier) -> str:
    """Return 32 hexadecimal digits for what a program checks the answers to a row by."""
    stored = [row.columns.get("completion"), row.columns.get("answers")]
    return _digest([CHECK_FORMAT, verifier, *_asked(row), *stored])


def _asked(row: PreparedRow) -> list[Any]:
    columns = row.columns
    return [columns.get("question") or row.text, columns.get("answer"), columns.get("rubric")]


def _digest(parts: Sequence[Any]) -> str:
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def gold_of(votes: Mapping[int, int], num_evals: int, highest: int) -> tuple[float, float] | None:
    """Return the mean of the votes on an answer, from 0 to 1, and their deviation.

    Args:
        votes: Grades by the number of the vote.
        num_evals: Number of votes that are needed.
        highest: The best grade.

    Returns:
        None if votes are missing.
    """
    grades = [votes[vote] / highest for vote in range(num_evals) if vote in votes]
    if len(grades) < num_evals:
        return None
    return statistics.fmean(grades), statistics.pstdev(grades)


def join_gold(row: PreparedRow, cache: GoldCache, recipe: Recipe) -> PreparedRow | None:
    """Return a row with the gold scores of its answers, None if one of them has none.

    Scores that the data have stay as they are. The answers to a verifiable row may be those that a
    program has made and checked.
    """
    if row.columns.get("gold_scores") is not None:
        return row
    found = [
        gold_of(cache.votes(vote_key(row, answer)), recipe.gold.num_evals, recipe.gold.highest)
        for answer in row.columns.get("answers") or ()
    ]
    scored = [one for one in found if one is not None]
    if len(scored) >= max(MIN_ANSWERS, len(found)):
        return row.with_columns(
            gold_scores=[mean for mean, _ in scored], gold_spread=[spread for _, spread in scored]
        )
    if row.kind != "verifiable":
        return None
    checked = cache.checked(check_key(row, recipe.sources[row.source].verifier))
    if checked is None:
        return None
    return row.with_columns(
        answers=[*checked.answers],
        gold_scores=[*checked.gold_scores],
        gold_spread=[0.0] * len(checked.answers),
    )


def refuse_unscored(
    rows: Sequence[PreparedRow], num_rows: int, command: str | None, left: Collection[str]
) -> None:
    """Raise UserError if there are rows without gold scores.

    Args:
        rows: The rows without gold scores.
        num_rows: Number of all rows.
        command: What scores them; None if the recipe has no judge.
        left: Sources that have other rows to train on.
    """
    if not rows:
        return
    ids = list_some([row.id for row in rows], _IDS_SHOWN)
    kinds = {row.kind for row in rows}
    why = "open rows are compared by them"
    fixes = [f"Score them by {command}" if command else "Set judge in the recipe to score them"]
    if kinds == {"verifiable"}:
        why = "the recipe says that its rows are scored"
    if "verifiable" in kinds:
        fixes.append("repair the verifiable ones for which that has found no gold")
    fixes.append("set columns.gold_scores of their source to the column that has them")
    if num_single := sum(not can_be_judged(row) for row in rows):
        why += f"; {num_single} have fewer than two answers, which cannot be compared"
        fixes.append("leave those with one answer out by where: {num_answers: [2, null]}")
    without = sorted({row.source for row in rows}.difference(left))
    if not without:
        fixes.append("keep only the others with --only_cached")
    elif left:
        fixes.append(f"take {' and '.join(without)} out of the recipe's sources")
    raise UserError(
        f"{len(rows)} of {num_rows} rows have no gold scores: {ids} ({why}). {'; or '.join(fixes)}."
    )


def can_be_judged(row: PreparedRow) -> bool:
    """Return whether a row has enough stored answers to be compared."""
    return row.kind == "verifiable" or len(row.columns.get("answers") or ()) >= MIN_ANSWERS
