"""Ask the judge for the votes that are missing, and record each one when it arrives.

A failure leaves no vote, only what it cost. Several processes share the calls by claims.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from lit_grpo.cli.precompute.claims import Claims
from lit_grpo.cli.precompute.votes import VoteCall
from lit_grpo.cli.prepare.fingerprint import Scorer
from lit_grpo.cli.prepare.gold_cache import JudgeVotes
from lit_grpo.judge import Judge
from lit_grpo.judge.examiner import Examiner, JudgeResult
from lit_grpo.types import Outcome

GRACE_SECONDS = 5.0
"""How long a signal waits for replies that are on their way: they are paid for."""
POLL_SECONDS = 0.2
"""How often to look whether another process is done with what it has claimed."""
MAX_FIRST_FAILURES = 20
"""Failures after which to stop if no call has succeeded."""


@dataclass(slots=True)
class VoteCounts:
    """Counts of the votes that this process asked for."""

    num_votes: int = 0
    failures: Counter[Outcome] = field(default_factory=Counter)
    details: dict[Outcome, str] = field(default_factory=dict)
    """Message of the first failure of each kind."""
    stopped: str = ""
    """Why it stopped before everything was asked."""
    signal: signal.Signals | None = None
    """The signal that stopped it."""

    def add(self, result: JudgeResult) -> None:
        if result.failure is None:
            self.num_votes += 1
            return
        outcome = result.failure.outcome
        if outcome is Outcome.BUDGET_SPENT:
            self.stopped = (
                f"{result.failure.detail} (all runs on this cache count). Raise "
                "judge.limits.max_cost_usd of the recipe before you run the command again"
            )
            return
        self.failures[outcome] += 1
        self.details.setdefault(outcome, result.failure.detail)
        if result.failure.is_access_error:
            self.stopped = result.failure.detail
        elif not self.num_votes and self.failures.total() >= MAX_FIRST_FAILURES:
            self.stopped = f"none of the first {self.failures.total()} votes arrived"


class JudgeRound:
    """Asks for votes until it has all of them or has to stop.

    Args:
        scorer: The judge.
        cache: Where votes are recorded.
        claims: Says which votes this process asks for.
        watch: Called after each call and each wait.
    """

    def __init__(
        self, scorer: Scorer, cache: JudgeVotes, claims: Claims, watch: Callable[[VoteCounts], None]
    ) -> None:
        self.scorer, self.cache, self.claims, self.watch = scorer, cache, claims, watch
        self.counts = VoteCounts()
        self._workers: list[asyncio.Task[None]] = []
        self._claimed_by_others: list[VoteCall] = []

    async def run(self, calls: Iterator[VoteCall]) -> VoteCounts:
        """Ask for all votes and return their counts.

        Raises:
            UserError: the judge refuses access, or the disk is full.
        """
        self._examiner = Examiner(
            judge=self.scorer.judge,
            template=self.scorer.template,
            items_per_call=self.scorer.gold.answers_per_call,
        )
        try:
            self._count_costs()
            await self._examiner.client.check_access()
            with _on_signals(self._stop):
                await self._ask_all(calls)
        finally:
            await self._examiner.close()
        return self.counts

    async def _ask_all(self, calls: Iterator[VoteCall]) -> None:
        while True:
            number = self.scorer.judge.limits.max_concurrency
            self._workers = [asyncio.create_task(self._work(calls)) for _ in range(number)]
            for result in await asyncio.gather(*self._workers, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
            if not self._claimed_by_others or self.counts.stopped:
                return
            calls, self._claimed_by_others = iter(self._claimed_by_others), []
            await asyncio.sleep(POLL_SECONDS)
            self.watch(self.counts)

    async def _work(self, calls: Iterator[VoteCall]) -> None:
        """Ask one call after the other; several workers share the iterator."""
        for call in calls:
            if self.counts.stopped:
                return
            try:
                await self._ask_claimed(call)
            except Exception as error:
                self.counts.stopped = str(error)
                raise
            self.watch(self.counts)

    def _stop(self, number: signal.Signals) -> None:
        """Start no further call; after a while, or at once at a second signal, end all others."""
        seconds = GRACE_SECONDS if self.counts.signal is None else 0.0
        self.counts.signal = number
        self.counts.stopped = f"{number.name} stopped it"
        asyncio.get_running_loop().call_later(seconds, self._cancel)

    def _cancel(self) -> None:
        for worker in self._workers:
            worker.cancel()

    async def _ask_claimed(self, call: VoteCall) -> None:
        """Ask for the votes of a call that are missing and that no other process asks for."""
        claimed = {key: f"{key}:{call.vote}" for key in call.answers}
        claimed = {key: name for key, name in claimed.items() if self.claims.take(name)}
        try:
            self._count_costs()
            missing = [key for key in call.answers if call.vote not in self.cache.votes(key)]
            own = {key: call.answers[key] for key in missing if key in claimed}
            others = {key: call.answers[key] for key in missing if key not in claimed}
            if others:
                self._claimed_by_others.append(replace(call, answers=others))
            if own:
                await self._ask(replace(call, answers=own))
        finally:
            for name in claimed.values():
                self.claims.release(name)

    async def _ask(self, call: VoteCall) -> None:
        items = [{"answer": answer} for answer in call.answers.values()]
        results = await self._examiner.examine(
            call.context, items, self.scorer.form, vote=call.vote
        )
        for key, result in zip(call.answers, results, strict=True):
            grade = None if result.verdict is None else result.verdict["score"]
            if grade is not None or result.cost:
                self.cache.add(key, call.vote, grade, result.cost)
            self.counts.add(result)
        self.cache.refresh()

    def _count_costs(self) -> None:
        """Read what all processes have recorded; what they spent counts against the budget."""
        self.cache.refresh()
        self._examiner.client.budget.resume(self.cache.spent_usd)


def with_share(judge: Judge, num_processes: int) -> Judge:
    """Return a judge with the share of its limits that each of several processes has.

    The limit on costs stays: every process counts what all have spent.
    """
    limits = judge.limits
    requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
    shared = replace(
        limits,
        max_concurrency=max(1, limits.max_concurrency // num_processes),
        requests_per_minute=requests and requests / num_processes,
        tokens_per_minute=tokens and tokens / num_processes,
    )
    return replace(judge, limits=shared)


@contextmanager
def _on_signals(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Within the context, call this at SIGINT and SIGTERM instead of ending the process."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
