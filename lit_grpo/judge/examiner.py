"""Get a verdict for each item: from the cache, or from calls that may hold several items.

Every item has its own id within a call, so it never gets the verdict of another item.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_grpo.judge.cache import VerdictCache, cache_key
from lit_grpo.judge.client import JudgeAnswer, JudgeClient, Question
from lit_grpo.judge.config import Judge
from lit_grpo.judge.connection import base_url
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.judge.reply import Form, Verdict
from lit_grpo.judge.template import JudgeTemplate, draw_ids, draw_nonce
from lit_grpo.types import Measurements, Outcome

Item = Mapping[str, Any]
"""The template's variables of one item, without its id, which is drawn for each call."""

SINGLE_ITEM_FAULTS = (Outcome.PARSE_ERROR, Outcome.OUT_OF_TOKENS, Outcome.CONTENT_FILTERED)
"""Failures of a call that a single item may have caused: each item is then asked separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeResult:
    """The result for one item: a verdict or a failure."""

    verdict: Verdict | None = None
    failure: JudgeFailure | None = None
    cost: float = 0.0
    """US dollars: the item's share of its calls."""


@dataclass(slots=True, kw_only=True)
class Examiner:
    """Ask one judge with one template.

    Args:
        template: Gets ``items``, each with an ``id``, in addition to the context's variables.
        items_per_call: Maximum number of items in a call.
    """

    judge: Judge
    template: JudgeTemplate
    items_per_call: int = 1
    client: JudgeClient = field(init=False)
    _cache: VerdictCache | None = field(init=False, default=None)
    _in_flight: dict[str, asyncio.Task[dict[str, JudgeResult]]] = field(
        init=False, default_factory=dict
    )
    """Cache key -> the call in flight for it, which equal items share."""

    def __post_init__(self) -> None:
        if self.judge.cache is not None:
            self._cache = VerdictCache(Path(self.judge.cache))
        self.client = JudgeClient(self.judge)

    async def close(self) -> None:
        """Cancel the calls in flight and close the client and the cache."""
        tasks = set(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        if self._cache is not None:
            self._cache.close()

    def observe(self) -> Measurements:
        """Return what was measured since the last call."""
        return self.client.ledger.read()

    async def examine(
        self, context: Mapping[str, Any], items: Sequence[Item], form: Form, *, vote: int = 0
    ) -> list[JudgeResult]:
        """Return a result for each item, in order.

        Args:
            context: Variables of the template that all items share.
            vote: Number of this vote among several independent ones.
        """
        keys = [self._key(context, item, form, vote) for item in items]
        found = {key: self._cached(key, form) for key in keys}
        item_of = dict(zip(keys, items, strict=True))
        fresh = [k for k, one in found.items() if one is None and k not in self._in_flight]
        for first in range(0, len(fresh), self.items_per_call):
            chunk = fresh[first : first + self.items_per_call]
            self._send(context, {key: item_of[key] for key in chunk}, form)
        waiting = {key: self._in_flight[key] for key, one in found.items() if one is None}
        for key, task in waiting.items():
            found[key] = (await asyncio.shield(task))[key]  # other calls may be waiting for it
        # Count the cost of a call once: for the first of several equal items, in the examine() that
        # started it.
        first_index = {key: index for index, key in reversed(list(enumerate(keys)))}
        results = [(key, found[key]) for key in keys]
        return [
            one if key in fresh and index == first_index[key] else replace(one, cost=0.0)
            for index, (key, one) in enumerate(results)
            if one is not None
        ]

    def _send(self, context: Mapping[str, Any], items: Mapping[str, Item], form: Form) -> None:
        """Start a call for items by key; later calls for equal items wait for the same task."""
        task = asyncio.create_task(self._ask_and_cache(context, items, form))
        self._in_flight |= dict.fromkeys(items, task)
        task.add_done_callback(lambda task: self._finish(items, task))

    def _finish(self, keys: Iterable[str], task: asyncio.Task[dict[str, JudgeResult]]) -> None:
        for key in keys:
            del self._in_flight[key]
        if not task.cancelled():
            task.exception()  # retrieve it, or asyncio would log one that no one awaited

    async def _ask_and_cache(
        self, context: Mapping[str, Any], items: Mapping[str, Item], form: Form
    ) -> dict[str, JudgeResult]:
        found = dict(zip(items, await self._ask(context, list(items.values()), form), strict=True))
        for key, result in found.items():
            await self._cache_verdict(key, result)
        return found

    async def _ask(
        self, context: Mapping[str, Any], items: Sequence[Item], form: Form
    ) -> list[JudgeResult]:
        """Ask for all items in one call, then separately for each without exactly one verdict."""
        ids = draw_ids(len(items))
        try:
            answer = await self.client.ask(self._question(context, items, ids, form))
        except JudgeFailure as failure:
            if len(items) == 1 or failure.outcome not in SINGLE_ITEM_FAULTS:
                return [JudgeResult(failure=failure, cost=failure.cost / len(items))] * len(items)
            answer = JudgeAnswer(verdicts={}, cost=failure.cost)
        share = answer.cost / len(items)
        missing = [index for index, one in enumerate(ids) if one not in answer.verdicts]
        asked = [self._ask(context, [items[index]], form) for index in missing]
        again = dict(zip(missing, await asyncio.gather(*asked), strict=True))
        return [
            replace(again[index][0], cost=again[index][0].cost + share)
            if index in again
            else JudgeResult(verdict=answer.verdicts[one], cost=share)
            for index, one in enumerate(ids)
        ]

    def _question(
        self, context: Mapping[str, Any], items: Sequence[Item], ids: Sequence[str], form: Form
    ) -> Question:
        nonce = draw_nonce([context, items])
        numbered = [{**item, "id": one} for item, one in zip(items, ids, strict=True)]
        values = {
            **context,
            "items": numbered,
            "nonce": nonce,
            "reply_form": form.instructions(len(items)),
        }
        return Question(messages=self.template.render(values), form=form, ids=ids)

    def _key(self, context: Mapping[str, Any], item: Item, form: Form, vote: int) -> str:
        judge = self.judge
        return cache_key(
            deployment=(judge.api, base_url(judge), judge.model),
            sampling=(judge.temperature, judge.max_completion_tokens, dict(judge.extra_body or {})),
            template=self.template.text,
            form=form.instructions(1),
            content=(dict(context), dict(item)),
            vote=vote,
        )

    def _cached(self, key: str, form: Form) -> JudgeResult | None:
        """Return the cached verdict if it has this form; a shared directory may hold others."""
        entry = None if self._cache is None else self._cache.get(key)
        if not isinstance(entry, Mapping):
            return None
        try:
            verdict = form.read(entry)
        except JudgeFailure:
            return None
        self.client.ledger.count("cache_hits")
        return JudgeResult(verdict=verdict)

    async def _cache_verdict(self, key: str, result: JudgeResult) -> None:
        if self._cache is not None and result.verdict is not None:
            # In a thread, since another process may hold the lock of the database.
            await asyncio.to_thread(self._cache.put, key, result.verdict)
