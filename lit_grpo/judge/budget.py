"""Limit the calls of one process to one deployment: concurrency, requests, tokens and cost.

Calls start in the order in which they came, so each waits for what the first of them needs.
The limits of a job are divided evenly among its processes: all ranks score equally many rows.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

from lit_grpo.concurrency import jitter
from lit_grpo.distributed.ranks import gather_objects, get_rank, get_world_size
from lit_grpo.judge.config import Judge, Limits
from lit_grpo.judge.connection import base_url
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.judge.spending import SpendingFile, read_all
from lit_grpo.types import Outcome, UserError, check_range

WINDOW_SECONDS = 60.0
RETRY_AFTER_JITTER = 0.25
"""Largest share added to a ``Retry-After`` wait, so that refused calls do not retry all at once."""

_budgets: dict[tuple[str, str], CallBudget] = {}
_registry_lock = threading.Lock()

Cause = Literal["max_concurrency", "requests_per_minute", "tokens_per_minute", "retry_after"]
"""Cause of a call's delay: a setting of ``Limits``, or the server's ``Retry-After``."""


@dataclass(slots=True)
class _Window:
    """A sliding window of one minute with a limit on the sum of its amounts."""

    limit: float
    entries: deque[list[float]] = field(default_factory=deque)
    """[time, amount]"""

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the seconds until ``amount`` fits.

        An amount above the limit fits once the window is empty.
        """
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
class CallPermit:
    """Whether one call may start, and how long it waited, by cause."""

    waited: dict[Cause, float] = field(default_factory=dict)
    """Seconds waited, by cause."""
    is_given: bool = False
    _tokens: list[float] | None = None

    def explain(self) -> JudgeFailure:
        """Return the failure of a call whose deadline passed before it could start.

        It names the cause with the longest wait.
        """
        cause, seconds = max(self.waited.items(), key=lambda one: one[1])
        return JudgeFailure(
            Outcome.TIMEOUT if cause == "max_concurrency" else Outcome.RATE_LIMITED,
            f"the call did not start within limits.deadline_seconds: it waited {seconds:.1f} s for "
            f"{cause}",
        )

    def settle(self, num_tokens: int) -> None:
        """Replace the estimated tokens of the call with the number that it used."""
        if self._tokens is not None:
            self._tokens[1] = num_tokens


@dataclass(slots=True)
class _Queue:
    """The calls of one event loop that wait to start; only the first one waits for a limit."""

    slots: asyncio.Semaphore
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the first call. The others get it in the order in which they came."""
    _waited: dict[Cause, float] = field(default_factory=lambda: {"max_concurrency": 0.0})
    """Seconds that first calls have waited since the queue was made, by cause."""
    _waits_now: tuple[Cause, float] | None = None
    """Cause and start of the first call's present wait."""

    @contextmanager
    def waiting_for(self, cause: Cause) -> Iterator[None]:
        """Count the time inside the context as a wait of all queued calls for this cause."""
        self._waits_now = cause, time.monotonic()
        try:
            yield
        finally:
            self._waited, self._waits_now = self._seconds(), None

    @contextmanager
    def measuring(self, permit: CallPermit) -> Iterator[None]:
        """Record the waits of a call that is in the queue while inside the context."""
        before = self._seconds()
        try:
            yield
        finally:
            after = self._seconds()
            permit.waited = {cause: after[cause] - before.get(cause, 0.0) for cause in after}

    def _seconds(self) -> dict[Cause, float]:
        """Return the waits so far, including the current one."""
        if self._waits_now is None:
            return self._waited
        cause, start = self._waits_now
        seconds = self._waited.get(cause, 0.0) + time.monotonic() - start
        return self._waited | {cause: seconds}


class CallBudget:
    """The limits of one deployment, shared by all its clients in this process.

    Clients may run on different event loops.

    Raises:
        UserError: the limits allow fewer concurrent calls, or calls per minute, than there are
            processes.
    """

    def __init__(self, limits: Limits, rank: int = 0, world_size: int = 1) -> None:
        for name in ("max_concurrency", "requests_per_minute"):
            check_range(
                f"judge.limits.{name}",
                getattr(limits, name),
                at_least=world_size,
                why=f"each of the {world_size} processes of the job needs at least one call",
            )
        self.limits = limits
        self.rank = rank
        self.world_size = world_size
        self.num_clients = 0
        self.spent_usd = 0.0
        """Spent by this process, in this run and the runs that it resumes."""
        self._paid_usd = 0.0  # since this process began
        share, rest = divmod(limits.max_concurrency, world_size)
        self._concurrency = share + (rank < rest)
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()
        per_minute: dict[Cause, float | None] = {
            "requests_per_minute": limits.requests_per_minute,
            "tokens_per_minute": limits.tokens_per_minute,
        }
        self._windows = {
            cause: _Window(limit / world_size) for cause, limit in per_minute.items() if limit
        }
        self._held_until = 0.0
        self._lock = threading.Lock()
        self._file: SpendingFile | None = None

    @asynccontextmanager
    async def slot(self, permit: CallPermit, num_tokens: float) -> AsyncIterator[None]:
        """Wait until a call of about ``num_tokens`` is allowed; hold its slot inside the context.

        Raises:
            JudgeFailure: ``max_cost_usd`` is spent.
        """
        queue = self._queue_of_running_loop()
        with queue.measuring(permit):
            async with queue.turn:
                await self._start(queue, permit, num_tokens)
        try:
            yield
        finally:
            queue.slots.release()

    async def _start(self, queue: _Queue, permit: CallPermit, num_tokens: float) -> None:
        """Wait until the first call of a queue is allowed, and take its slot.

        It takes the slot before it waits for the rates, since calls count from when they are sent.
        """
        with queue.waiting_for("max_concurrency"):
            await queue.slots.acquire()
        try:
            while (wait := self._admit(permit, num_tokens)) is not None:
                cause, seconds = wait
                with queue.waiting_for(cause):
                    await asyncio.sleep(seconds)
            permit.is_given = True
        finally:
            if not permit.is_given:
                queue.slots.release()

    def hold_off(self, seconds: float) -> None:
        """Start no further call for this long, since the server would refuse it."""
        with self._lock:
            self._held_until = max(self._held_until, time.monotonic() + seconds)

    def spend(self, usd: float) -> None:
        """Add the cost of a call."""
        with self._lock:
            self.spent_usd += usd
            self._paid_usd += usd
            if usd and self._file is not None:
                self._file.write(self.spent_usd)

    def resume(self, spent_usd: float) -> None:
        """Count what the job had spent before it was stopped; repeated calls change nothing."""
        with self._lock:
            self.spent_usd = max(self.spent_usd, spent_usd / self.world_size)

    def record_in(self, file: SpendingFile) -> None:
        """Count what a run has spent by its files, and keep the sum in this one from now on.

        Every rank must call this.
        """
        if self._file is not None and self._file.path == file.path:
            return  # another reward with the same judge
        earlier = file.of_ranks_from(self.world_size) if self.rank == 0 else []
        total = sum(gather_objects(read_all([file.path, *earlier])))
        self.close()
        with self._lock:
            self.spent_usd = max(self.spent_usd, total / self.world_size + self._paid_usd)
            self._file = file
            if self.spent_usd:
                file.write(self.spent_usd)
        for path in earlier:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file of the run."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _queue_of_running_loop(self) -> _Queue:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._queues:
                self._queues[loop] = _Queue(asyncio.Semaphore(self._concurrency))
            return self._queues[loop]

    def _admit(self, permit: CallPermit, num_tokens: float) -> tuple[Cause, float] | None:
        """Count the call in the windows, or return what to wait for and how long."""
        amounts: dict[Cause, float] = {"requests_per_minute": 1, "tokens_per_minute": num_tokens}
        with self._lock:
            self._check_cost()
            now = time.monotonic()
            if (held := self._held_until - now) > 0:
                return "retry_after", held * (1 + jitter.uniform(0, RETRY_AFTER_JITTER))
            for cause, window in self._windows.items():
                if (seconds := window.seconds_until(amounts[cause], now)) > 0:
                    return cause, seconds
            for cause, window in self._windows.items():
                window.entries.append([now, amounts[cause]])
            if tokens := self._windows.get("tokens_per_minute"):
                permit._tokens = tokens.entries[-1]
        return None

    def _check_cost(self) -> None:
        limit = self.limits.max_cost_usd
        if limit is None or self.spent_usd < limit / self.world_size:
            return
        spent = f"{self.spent_usd:.4f} US dollars"
        detail = f"{spent} have been spent, and limits.max_cost_usd is {limit:g}"
        if self.world_size > 1:
            share = f"its share of limits.max_cost_usd ({limit:g}) is {limit / self.world_size:g}"
            detail = f"this process has spent {spent}, and {share}"
        raise JudgeFailure(Outcome.BUDGET_SPENT, detail)


def deployment_of(judge: Judge) -> tuple[str, str]:
    """Return the address and the model, which rewards that share a budget have in common."""
    return base_url(judge), judge.model


def budget_of(judge: Judge) -> CallBudget:
    """Return the budget of a deployment, one per process however many rewards use it.

    Each client gives it back with ``release``.

    Raises:
        UserError: another reward has different limits for the same deployment.
    """
    deployment = deployment_of(judge)
    with _registry_lock:
        budget = _budgets.get(deployment)
        if budget is None:
            budget = CallBudget(judge.limits, get_rank(), get_world_size())
            _budgets[deployment] = budget
        elif budget.limits.shared != judge.limits.shared:
            raise UserError(
                f"all rewards that use the judge {judge.model} must have the same limits, got "
                f"{judge.limits.shared} and {budget.limits.shared} (the limits are those of the "
                "deployment). Set the same judge.limits."
            )
        budget.num_clients += 1
        return budget


def release(budget: CallBudget) -> None:
    """Give a budget back, and delete it with its last client."""
    with _registry_lock:
        budget.num_clients -= 1
        if not budget.num_clients:
            deployment = next(key for key, one in _budgets.items() if one is budget)
            del _budgets[deployment]
            budget.close()
