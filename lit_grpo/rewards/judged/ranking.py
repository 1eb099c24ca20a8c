"""A reward from the order in which a language model ranks the completions of a prompt.

Values are relative to the siblings: they say nothing about the quality of a whole group.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

from lit_grpo.judge import Judge
from lit_grpo.judge.examiner import JudgeResult
from lit_grpo.judge.reply import Form, Order, Text
from lit_grpo.rewards.judged.base import JudgedReward, agreement, failed_score, question_of
from lit_grpo.rewards.reward import setting_key
from lit_grpo.types import Completion, Prompt, Score
from lit_grpo.types.field_types import check_value, checks_types

Kind = Literal["listwise", "pairwise"]
MIN_ANSWERED = 0.5
"""Share of a completion's comparisons that must succeed for it to have a value."""


@checks_types
class RankingReward(JudgedReward):
    """The share of siblings that a completion is ranked above, from 0 to 1.

    Equal texts are shown once and share their value; if all are equal, it is 0.5. Answers are
    shuffled for each vote, and every second vote shows the previous order in reverse, so a
    judge's preference for a position cancels out.

    Args:
        judge: The model, its address and its limits.
        template: Name of a bundled template, or the path of your own. Its variables are
            ``question``, ``reference`` (none if there is no gold answer) and ``items``: sets with
            an ``id`` and ``answers``, each with ``label`` and ``answer``.
        votes: Number of independent rankings; their mean counts.
        kind: ``listwise`` ranks the whole group in one call. ``pairwise`` compares every two
            completions, which is more reliable and takes G(G-1)/2 calls.
        show_reference: Whether to show the judge the gold answer, if the row has one.
    """

    template_variables = ("question", "reference", "items")
    template_needs = ("question", "items")
    votes_differ = True

    def __init__(
        self,
        judge: Judge,
        template: str = "ranking",
        votes: int = 1,
        kind: Kind = "listwise",
        show_reference: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(judge, template, votes, **settings)
        check_value(setting_key(self, "kind"), kind, Kind)
        self.kind = kind
        self.show_reference = show_reference

    async def score_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Sequence[Score]:
        texts = list(dict.fromkeys(completion.text for completion in completions))
        if len(texts) == 1:
            return [Score(value=0.5, detail="all completions are equal")] * len(completions)
        sets = list(combinations(texts, 2)) if self.kind == "pairwise" else [tuple(texts)]
        context = {
            "question": question_of(prompt),
            "reference": prompt.answer if self.show_reference else None,
        }
        asked = [(one, vote) for one in sets for vote in range(self.votes)]
        found = await asyncio.gather(*(self._rank(context, one, vote) for one, vote in asked))
        self._note_agreement([ranks for _, ranks in found])
        cost = sum(result.cost for result, _ in found) / len(completions)
        return [self._score(completion.text, found, asked, cost) for completion in completions]

    async def _rank(
        self, context: Mapping[str, Any], texts: Sequence[str], vote: int
    ) -> tuple[JudgeResult, Mapping[str, float]]:
        """Ask for the order of a set, and return text -> share of the others it is above."""
        shown = sorted(texts)
        # Seeded by the texts alone, so the same question is found in a cache.
        random.Random(repr((vote // 2, shown))).shuffle(shown)
        if vote % 2:
            shown.reverse()
        labels = tuple(f"A{number}" for number in range(1, len(shown) + 1))
        pairs = zip(labels, shown, strict=True)
        item = {"answers": [{"label": label, "answer": text} for label, text in pairs]}
        form = Form({"explanation": Text(), "order": Order(labels)})
        (result,) = await self.examiner.examine(context, [item], form, vote=vote)
        if result.verdict is None:
            return result, {}
        text_of = dict(zip(labels, shown, strict=True))
        last = len(shown) - 1
        order = enumerate(result.verdict["order"])
        return result, {text_of[label]: 1 - place / last for place, label in order}

    def _score(
        self,
        text: str,
        found: Sequence[tuple[JudgeResult, Mapping[str, float]]],
        asked: Sequence[tuple[Sequence[str], int]],
        cost: float,
    ) -> Score:
        mine = [one for one, (texts, _) in zip(found, asked, strict=True) if text in texts]
        shares = [ranks[text] for _, ranks in mine if ranks]
        if len(shares) < MIN_ANSWERED * len(mine):
            return failed_score([result for result, _ in mine], cost)
        detail = f"above {sum(shares) / len(shares):.0%} of its siblings in {len(shares)} rankings"
        return Score(value=sum(shares) / len(shares), detail=detail, cost=cost)

    def _note_agreement(self, orders: Sequence[Mapping[str, float]]) -> None:
        """Record the agreement on every pair of texts that was compared more than once."""
        wins: dict[tuple[str, str], list[bool]] = {}
        for ranks in orders:
            for first, second in _pairs(ranks):
                wins.setdefault((first, second), []).append(ranks[first] > ranks[second])
        self._agreements += [agreement(one) for one in wins.values() if len(one) > 1]


def _pairs(ranks: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    return combinations(sorted(ranks), 2)
