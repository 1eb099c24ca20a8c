"""Verdicts on items: what the cache has, the rest in calls of several items, each by its own id.

An item is missing, or judged; it never gets the verdict of another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lit_grpo.judge.cache import VerdictCache, cache_key
from lit_grpo.judge.client import Answer, JudgeClient, Question
from lit_grpo.judge.config import Judge
from lit_grpo.judge.connection import base_url
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.judge.reply import Form, Verdict
from lit_grpo.judge.template import JudgeTemplate, draw_ids, draw_nonce
from lit_grpo.types import Observed, Outcome

Item = Mapping[str, Any]
"""What the template shows of one item, without the id that it gets for a call."""


LIES_IN_ONE = (Outcome.PARSE_ERROR, Outcome.OUT_OF_TOKENS, Outcome.CONTENT_FILTERED)
"""What one item of a call can bring on all of them: they are asked alone then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of one item: a verdict, or a failure."""

    verdict: Verdict | None = None
    failure: JudgeFailure | None = None
    cost: float = 0.0
    """US dollars: its share of the calls."""


@dataclass(slots=True, kw_only=True)
class Examiner:
    """Asks one judge under one template.

    Args:
        template: Given ``items``, each with an ``id``, beside the context's own variables.
        items_per_call: At most so many items share a call.
    """

    judge: Judge
    template: JudgeTemplate
    items_per_call: int = 1
    client: JudgeClient = field(init=False)
    _cache: VerdictCache | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.client = JudgeClient(self.judge)
        if self.judge.cache is not None:
            self._cache = VerdictCache(self.judge.cache)

    async def close(self) -> None:
        await self.client.close()
        if self._cache is not None:
            self._cache.close()

    def observe(self) -> Observed:
        """What was measured since the last time."""
        return self.client.ledger.read()

    async def examine(
        self, context: Mapping[str, Any], items: Sequence[Item], form: Form, *, vote: int = 0
    ) -> list[Finding]:
        """A finding for each item, in their order.

        Args:
            context: Variables of the template that all items share.
            vote: Which of several independent opinions this is.
        """
        keys = [self._key(context, item, form, vote) for item in items]
        findings = {place: self._remembered(key, form) for place, key in enumerate(keys)}
        open_places = [place for place, one in findings.items() if one is None]
        size = self.items_per_call
        chunks = [open_places[i : i + size] for i in range(0, len(open_places), size)]

        async def ask_and_keep(chunk: Sequence[int]) -> None:
            found = await self._ask(context, [items[place] for place in chunk], form)
            for place, finding in zip(chunk, found, strict=True):
                findings[place] = finding
                await self._remember(keys[place], finding)

        await asyncio.gather(*map(ask_and_keep, chunks))
        return [finding for finding in findings.values() if finding is not None]

    async def _ask(
        self, context: Mapping[str, Any], items: Sequence[Item], form: Form
    ) -> list[Finding]:
        """One call for all, then one for each that it left without exactly one verdict."""
        ids = draw_ids(len(items))
        try:
            answer = await self.client.ask(self._question(context, items, ids, form))
        except JudgeFailure as failure:
            if len(items) == 1 or failure.outcome not in LIES_IN_ONE:
                return [Finding(failure=failure, cost=failure.cost / len(items))] * len(items)
            answer = Answer(verdicts={}, cost=failure.cost)
        share = answer.cost / len(items)
        missing = [place for place, one in enumerate(ids) if one not in answer.verdicts]
        asked = [self._ask(context, [items[place]], form) for place in missing]
        again = dict(zip(missing, await asyncio.gather(*asked), strict=True))
        return [
            replace(again[place][0], cost=again[place][0].cost + share)
            if place in again
            else Finding(verdict=answer.verdicts[one], cost=share)
            for place, one in enumerate(ids)
        ]

    def _question(
        self, context: Mapping[str, Any], items: Sequence[Item], ids: Sequence[str], form: Form
    ) -> Question:
        nonce = draw_nonce([context, items])
        named = [{**item, "id": one} for item, one in zip(items, ids, strict=True)]
        values = {**context, "items": named, "nonce": nonce, "reply_form": form.words(len(items))}
        return Question(messages=self.template.render(values), form=form, ids=ids)

    def _key(self, context: Mapping[str, Any], item: Item, form: Form, vote: int) -> str:
        judge = self.judge
        return cache_key(
            deployment=(judge.api, base_url(judge), judge.model),
            sampling=(judge.temperature, judge.max_completion_tokens, dict(judge.extra_body)),
            template=self.template.text,
            form=form.words(1),
            content=(dict(context), dict(item)),
            vote=vote,
        )

    def _remembered(self, key: str, form: Form) -> Finding | None:
        """What the cache has, if it still has the form: others may write there, too."""
        kept = None if self._cache is None else self._cache.get(key)
        if not isinstance(kept, Mapping):
            return None
        try:
            verdict = form.read(kept)
        except JudgeFailure:
            return None
        self.client.ledger.count("cache_hits")
        return Finding(verdict=verdict)

    async def _remember(self, key: str, finding: Finding) -> None:
        if self._cache is not None and finding.verdict is not None:
            # In a thread: another process may be writing, and the loop must not wait for it.
            await asyncio.to_thread(self._cache.put, key, finding.verdict)
