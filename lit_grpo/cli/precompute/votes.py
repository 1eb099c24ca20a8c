"""List the missing votes on stored answers, as calls to a judge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lit_grpo.cli.prepare.gold_cache import JudgeVotes
from lit_grpo.cli.prepare.join_gold import vote_key
from lit_grpo.cli.prepare.recipe import Gold
from lit_grpo.cli.prepare.rows import PreparedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteCall:
    """One vote on some of the answers to a question."""

    context: Mapping[str, Any]
    """What the judge sees in addition to the answers."""
    vote: int
    """The number of the vote."""
    answers: Mapping[str, str]
    """`vote_key` -> the answer."""


def missing_calls(rows: Iterable[PreparedRow], gold: Gold, cache: JudgeVotes) -> Iterator[VoteCall]:
    """Yield the calls for the votes that are not in the cache at that moment.

    An answer that several rows have to the same question is asked about once.
    """
    seen: set[str] = set()
    for row in rows:
        by_key = {vote_key(row, answer): answer for answer in row.columns["answers"]}
        answers = {key: answer for key, answer in by_key.items() if key not in seen}
        seen |= answers.keys()
        context = {
            "question": row.columns.get("question") or row.text,
            "reference": row.columns.get("answer") if gold.show_reference else None,
            "rubric": row.columns.get("rubric"),
            "highest": gold.highest,
        }
        for vote in range(gold.num_evals):
            keys = [key for key in answers if vote not in cache.votes(key)]
            for first in range(0, len(keys), gold.answers_per_call):
                chunk = keys[first : first + gold.answers_per_call]
                yield VoteCall(
                    context=context, vote=vote, answers={key: answers[key] for key in chunk}
                )
