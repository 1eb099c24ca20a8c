"""Verdicts on items: what the cache has, the rest in calls of several items, each by its own id.

An item is missing, or judged; it never gets the verdict of another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lit_grpo.judge.cache import VerdictCache, cache_key
from lit_grpo.judge.client import Answer, JudgeClient, Question
from lit_grpo.judge.config import Judge
from lit_grpo.judge.connection import base_url
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.judge.reply import Form, Verdict
from lit_grpo.judge.template import JudgeTemplate, draw_ids, draw_nonce
from lit_grpo.types import Measurements, Outcome

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
    _in_flight: dict[str, asyncio.Task[dict[str, Finding]]] = field(
        init=False, default_factory=dict
    )
    """Key -> the call that will bring its finding: equal items are asked, and paid, once."""

    def __post_init__(self) -> None:
        if self.judge.cache is not None:
            self._cache = VerdictCache(self.judge.cache)
        self.client = JudgeClient(self.judge)

    async def close(self) -> None:
        tasks = set(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        if self._cache is not None:
            self._cache.close()

    def observe(self) -> Measurements:
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
        found = {key: self._remembered(key, form) for key in keys}
        item_of = dict(zip(keys, items, strict=True))
        fresh = [k for k, one in found.items() if one is None and k not in self._in_flight]
        for first in range(0, len(fresh), self.items_per_call):
            chunk = fresh[first : first + self.items_per_call]
            self._send(context, {key: item_of[key] for key in chunk}, form)
        waiting = {key: self._in_flight[key] for key, one in found.items() if one is None}
        for key, task in waiting.items():
            found[key] = (await asyncio.shield(task))[key]  # others may wait for it, too
        first_place = {key: place for place, key in reversed(list(enumerate(keys)))}
        findings = [(key, found[key]) for key in keys]
        return [
            one if key in fresh and place == first_place[key] else replace(one, cost=0.0)
            for place, (key, one) in enumerate(findings)
            if one is not None
        ]

    def _send(self, context: Mapping[str, Any], items: Mapping[str, Item], form: Form) -> None:
        """Asks for verdicts on items by key, for all who want one of them meanwhile."""
        task = asyncio.create_task(self._ask_and_keep(context, items, form))
        self._in_flight |= dict.fromkeys(items, task)
        task.add_done_callback(lambda task: self._land(items, task))

    def _land(self, keys: Iterable[str], task: asyncio.Task[dict[str, Finding]]) -> None:
        for key in keys:
            del self._in_flight[key]
        if not task.cancelled():
            task.exception()  # it may be that nobody waits any more to see it

    async def _ask_and_keep(
        self, context: Mapping[str, Any], items: Mapping[str, Item], form: Form
    ) -> dict[str, Finding]:
        found = dict(zip(items, await self._ask(context, list(items.values()), form), strict=True))
        for key, finding in found.items():
            await self._remember(key, finding)
        return found

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
            sampling=(judge.temperature, judge.max_completion_tokens, dict(judge.extra_body or {})),
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
