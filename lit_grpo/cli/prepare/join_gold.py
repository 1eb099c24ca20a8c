"""Gold scores of stored answers, from the cache to the rows."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol

from lit_grpo.cli.prepare.recipe import Recipe
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.types import UserError

_IDS_SHOWN = 5


class GoldCache(Protocol):
    """What is known of the quality of stored answers."""

    def votes(self, key: str) -> Mapping[int, int]:
        """Return the grades of an answer by the number of the vote; see `vote_key`."""
        ...


class NoCache:
    """A cache that is not there: nothing is scored."""

    def votes(self, key: str) -> Mapping[int, int]:
        return {}


def vote_key(row: PreparedRow, answer: str) -> str:
    """Return 32 hexadecimal digits for what a judge is asked about an answer."""
    asked = [row.columns.get("question") or row.text, row.columns.get("answer")]
    parts = [*asked, row.columns.get("rubric"), answer]
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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

    Scores that the data have stay as they are.
    """
    if row.columns.get("gold_scores") is not None:
        return row
    found = [
        gold_of(cache.votes(vote_key(row, answer)), recipe.gold.num_evals, recipe.gold.highest)
        for answer in row.columns.get("answers") or ()
    ]
    scored = [one for one in found if one is not None]
    if len(scored) < max(2, len(found)):
        return None
    return row.with_columns(
        gold_scores=[mean for mean, _ in scored], gold_spread=[spread for _, spread in scored]
    )


def refuse_unscored(rows: Sequence[PreparedRow], num_rows: int) -> None:
    """Raise UserError if there are rows without gold scores."""
    if rows:
        more = len(rows) - _IDS_SHOWN
        ids = ", ".join(row.id for row in rows[:_IDS_SHOWN]) + (f" and {more} more" * (more > 0))
        raise UserError(
            f"{len(rows)} of {num_rows} rows have no gold scores: {ids} (open rows are compared by "
            "them). Set columns.gold_scores of their source to the column that has them, or keep "
            "only the others by --only_cached."
        )
