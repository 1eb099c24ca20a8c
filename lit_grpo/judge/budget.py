"""What one process may ask of one deployment: calls at a time, calls and tokens a minute, dollars.

The limits of a job are divided evenly among its processes, which are in step anyway. Knows nothing
of what is asked.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import torch.distributed

from lit_grpo.concurrency import jitter
from lit_grpo.judge.config import Judge, Limits
from lit_grpo.judge.connection import base_url
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.types import Outcome, UserError

WINDOW_SECONDS = 60.0
HOLD_JITTER = 0.25
"""Of the time that a server asks to wait: spreads those who were refused together."""

_budgets: dict[tuple[str, str], CallBudget] = {}
_registry_lock = threading.Lock()


Cause = Literal["max_concurrency", "requests_per_minute", "tokens_per_minute", "retry_after"]
"""What a call waited for: the setting that holds it up, or the server itself."""


@dataclass(slots=True)
class _Window:
    """Amounts within the last minute; none is forgotten before it is over."""

    limit: float
    entries: deque[list[float]] = field(default_factory=deque)
    """[time, amount]"""

    def seconds_until(self, amount: float, now: float) -> float:
        """When so much more fits; what is larger than the limit gets a minute of its own."""
        while self.entries and self.entries[0][0] <= now - WINDOW_SECONDS:
            self.entries.popleft()
        excess = sum(spent for _, spent in self.entries) + amount - self.limit
        until = now
        for moment, spent in self.entries:
            if excess <= 0:
                break
            excess -= spent
            until = moment + WINDOW_SECONDS
        return until - now


@dataclass(slots=True)
class Grant:
    """Leave to make one call."""

    waited: dict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by what was waited for."""
    is_given: bool = False
    _tokens: list[float] | None = None

    @contextmanager
    def waiting_for(self, cause: Cause) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.waited[cause] += time.monotonic() - start

    def explain(self) -> JudgeFailure:
        """Why a call that ran out of time before it began had to wait so long."""
        cause, seconds = max(self.waited.items(), key=lambda one: one[1])
        return JudgeFailure(
            Outcome.TIMEOUT if cause == "max_concurrency" else Outcome.RATE_LIMITED,
            f"no call within limits.deadline_seconds: {seconds:.1f} s went into waiting for "
            f"{cause}",
        )

    def settle(self, num_tokens: int) -> None:
        """Count the tokens that the call took instead of those that were expected."""
        if self._tokens is not None:
            self._tokens[1] = num_tokens


class CallBudget:
    """Shared by all who ask one deployment in this process, on whichever event loop.

    Raises:
        ValueError: fewer calls at a time, or a minute, than processes.
    """

    def __init__(self, limits: Limits, rank: int = 0, world_size: int = 1) -> None:
        for name in ("max_concurrency", "requests_per_minute"):
            if (limit := getattr(limits, name)) is not None and limit < world_size:
                raise UserError(
                    f"limits.{name} must be at least the {world_size} processes of the job, "
                    f"got {limit:g} (each makes one call at least). Set it of the judge."
                )
        self.limits = limits
        self.world_size = world_size
        self.num_clients = 0
        self.spent_usd = 0.0
        """By this process, in this run and those that it resumes."""
        share, rest = divmod(limits.max_concurrency, world_size)
        self._concurrency = share + (rank < rest)
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._slots = WeakKeyDictionary()
        per_minute: dict[Cause, float | None] = {
            "requests_per_minute": limits.requests_per_minute,
            "tokens_per_minute": limits.tokens_per_minute,
        }
        self._windows = {
            cause: _Window(limit / world_size) for cause, limit in per_minute.items() if limit
        }
        self._held_until = 0.0
        self._lock = threading.Lock()

    @asynccontextmanager
    async def slot(self, grant: Grant, num_tokens: float) -> AsyncIterator[None]:
        """Waits for leave to make a call of about so many tokens; the slot is held within.

        Raises:
            JudgeFailure: the money is spent.
        """
        slots = self._slots_here()
        with grant.waiting_for("max_concurrency"):
            await slots.acquire()
        try:
            while (wait := self._admit(grant, num_tokens)) is not None:
                cause, seconds = wait
                with grant.waiting_for(cause):
                    await asyncio.sleep(seconds)
            grant.is_given = True
            yield
        finally:
            slots.release()

    def hold_off(self, seconds: float) -> None:
        """Lets no further call begin for so long: the server has said that it would refuse it."""
        with self._lock:
            self._held_until = max(self._held_until, time.monotonic() + seconds)

    def spend(self, usd: float) -> None:
        with self._lock:
            self.spent_usd += usd

    def resume(self, spent_usd: float) -> None:
        """Take over what the job had spent before it was stopped; again makes no difference."""
        with self._lock:
            self.spent_usd = max(self.spent_usd, spent_usd / self.world_size)

    def _slots_here(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        with self._lock:
            return self._slots.setdefault(loop, asyncio.Semaphore(self._concurrency))

    def _admit(self, grant: Grant, num_tokens: float) -> tuple[Cause, float] | None:
        """Enters the call in the windows, or says what to wait for and how long."""
        amounts: dict[Cause, float] = {"requests_per_minute": 1, "tokens_per_minute": num_tokens}
        with self._lock:
            self._refuse_overspending()
            now = time.monotonic()
            if (held := self._held_until - now) > 0:
                return "retry_after", held * (1 + jitter.uniform(0, HOLD_JITTER))
            for cause, window in self._windows.items():
                if (seconds := window.seconds_until(amounts[cause], now)) > 0:
                    return cause, seconds
            for cause, window in self._windows.items():
                window.entries.append([now, amounts[cause]])
            if tokens := self._windows.get("tokens_per_minute"):
                grant._tokens = tokens.entries[-1]
        return None

    def _refuse_overspending(self) -> None:
        limit = self.limits.max_cost_usd
        if limit is not None and self.spent_usd >= limit / self.world_size:
            raise JudgeFailure(
                Outcome.BUDGET_SPENT,
                f"this process has spent {self.spent_usd:.4f} US dollars of its share of "
                f"limits.max_cost_usd {limit:g}, which is {limit / self.world_size:g}",
            )


def budget_of(judge: Judge) -> CallBudget:
    """The one budget of a deployment in this process, however many rewards ask it.

    Each gives it back with ``release``.

    Raises:
        ValueError: other limits than another reward gave the same deployment.
    """
    place = (base_url(judge), judge.model)
    with _registry_lock:
        known = _budgets.get(place)
        if known is None:
            known = _budgets[place] = CallBudget(judge.limits, *_rank_and_world_size())
        elif known.limits.shared != judge.limits.shared:
            raise UserError(
                f"rewards that ask the same judge, {judge.model}, must give it the same limits, "
                f"got {judge.limits.shared} and {known.limits.shared} (they share them). Set the "
                "same limits."
            )
        known.num_clients += 1
        return known


def release(budget: CallBudget) -> None:
    """Forgets a budget that its last client gives back."""
    with _registry_lock:
        budget.num_clients -= 1
        if not budget.num_clients:
            place = next(place for place, one in _budgets.items() if one is budget)
            del _budgets[place]


def _rank_and_world_size() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
