"""Run rewards: one thread for each sync reward, one event loop for all async ones.

A runner takes calls and delivers their scores. Exceptions and timeouts of a reward become scores
without a value.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar, cast

from lit_grpo.concurrency import EventLoopThread, backoff
from lit_grpo.rewards.reward import Reward
from lit_grpo.rewards.scoring.boundary import as_score, as_scores, failed_scores
from lit_grpo.types import Completion, Prompt, Score

T = TypeVar("T")

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
CLOSE_SECONDS = 1.8

_log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Takes the scores of calls until it is cancelled."""

    @property
    def is_cancelled(self) -> bool: ...

    def deliver(self, call: Call, scores: tuple[Score, ...]) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of ``score`` (one row) or ``score_group`` (rows of one prompt), with its retries."""

    reward: Reward
    receiver: Receiver
    prompt: Prompt
    rows: tuple[int, ...]
    completions: tuple[Completion, ...]
    tries: list[tuple[Score, ...]] = field(default_factory=list)

    def invoke(self) -> object:
        """Call the reward; the result of an async one is awaitable."""
        if self.reward.is_grouped:
            return self.reward.score_group(self.prompt, self.completions)
        return self.reward.score(self.prompt, self.completions[0])

    def as_scores(self, result: object, seconds: float) -> tuple[Score, ...]:
        if self.reward.is_grouped:
            return as_scores(result, len(self.rows), seconds, self.reward.scorer)
        return (as_score(result, seconds, self.reward.scorer),)

    def failed(self, error: BaseException, seconds: float) -> tuple[Score, ...]:
        return failed_scores(error, len(self.rows), seconds)

    def conclude(self, scores: tuple[Score, ...]) -> float | None:
        """Deliver the scores, or return the seconds to wait before the next try."""
        self.tries.append(scores)
        may_retry = self.reward.on_error == "retry" and len(self.tries) <= self.reward.num_retries
        if may_retry and any(score.is_failure for score in scores):
            return backoff(len(self.tries), FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        self.receiver.deliver(self, scores if len(self.tries) == 1 else self._with_all_tries())
        return None

    def _with_all_tries(self) -> tuple[Score, ...]:
        """Return the last scores, with the seconds and the cost of all tries."""
        return tuple(
            replace(
                attempts[-1],
                seconds=sum(score.seconds for score in attempts),
                cost=sum(score.cost for score in attempts),
            )
            for attempts in zip(*self.tries, strict=True)
        )


class AsyncRunner:
    """Run all async rewards on one event loop, so that their clients can stay bound to it."""

    def __init__(self) -> None:
        self._thread = EventLoopThread("async-rewards")
        self._inbox: deque[Call] = deque()
        self._is_woken = False
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result."""
        return self._thread.run(coroutine)

    def call_later(self, seconds: float, function: Callable[[Call], None], call: Call) -> None:
        loop = self._thread.loop
        loop.call_soon_threadsafe(loop.call_later, seconds, function, call)

    def submit(self, call: Call) -> None:
        # Waking the loop is slow: one wake-up serves all calls that arrive before it runs.
        self._inbox.append(call)
        if not self._is_woken:
            self._is_woken = True
            self._thread.loop.call_soon_threadsafe(self._take_inbox)

    def close(self, hooks: Sequence[Callable[[], Coroutine[Any, Any, object]]] = ()) -> None:
        """Cancel pending calls, run the hooks and end the thread, within 2 seconds.

        If user code blocks the loop, its thread is abandoned.
        """
        try:
            self._thread.run(self._shut_down(hooks), timeout=CLOSE_SECONDS)
        except TimeoutError:
            _log.warning("the event loop of the async rewards is blocked; its thread is abandoned")
        self._thread.close(timeout=0.2)

    def _take_inbox(self) -> None:
        self._is_woken = False
        while self._inbox:
            task = self._thread.loop.create_task(_score_async(self._inbox.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _shut_down(self, hooks: Sequence[Callable[[], Coroutine[Any, Any, object]]]) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS / 3)
        closing = [asyncio.wait_for(hook(), CLOSE_SECONDS / 2) for hook in hooks]
        errors = await asyncio.gather(*closing, return_exceptions=True)
        for hook, error in zip(hooks, errors, strict=True):
            if isinstance(error, BaseException):
                _log.warning("%s failed: %r", hook.__qualname__, error)


async def _score_async(call: Call) -> None:
    while not call.receiver.is_cancelled:
        seconds = call.conclude(await _attempt_async(call))
        if seconds is None:
            return
        await asyncio.sleep(seconds)


async def _attempt_async(call: Call) -> tuple[Score, ...]:
    start = time.perf_counter()
    limit = call.reward.timeout_seconds
    try:
        async with asyncio.timeout(limit) as deadline:
            result = await cast(Awaitable[object], call.invoke())
        return call.as_scores(result, time.perf_counter() - start)
    except BaseException as error:  # user code may raise anything, and the loop must continue
        task = asyncio.current_task()
        if isinstance(error, GeneratorExit) or (task is not None and task.cancelling()):
            raise
        reason = _timeout(limit) if limit is not None and deadline.expired() else error
        return call.failed(reason, time.perf_counter() - start)


def _timeout(seconds: float, consequence: str = "") -> TimeoutError:
    return TimeoutError(f"no score within {seconds:g} s (timeout_seconds){consequence}")


class SyncRunner:
    """One thread for one sync reward, replaced when a call in it times out."""

    def __init__(self, reward: Reward, loop: AsyncRunner) -> None:
        self._reward = reward
        self._loop = loop
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._running: tuple[Call, float] | None = None
        self._start_thread()

    def submit(self, call: Call) -> None:
        self._calls.put(call)

    def expire(self) -> float | None:
        """Give up on a call that has timed out; return the seconds until the next timeout.

        None means that the reward has no timeout.
        """
        limit = self._reward.timeout_seconds
        if limit is None:
            return None
        with self._lock:
            running = self._running
            if running is None:
                return limit
            left = running[1] + limit - time.perf_counter()
            if left > 0:
                return left
            self._running = None
            self._start_thread()
        error = _timeout(limit, "; its thread cannot be stopped and is abandoned")
        self._conclude(running[0], running[0].failed(error, limit))
        return limit

    def close(self) -> None:
        """End the thread after its current call; calls of cancelled receivers are skipped."""
        self._calls.put(None)
        self._thread.join(timeout=0.2)

    def _start_thread(self) -> None:
        name = f"reward-{self._reward.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if call.receiver.is_cancelled:
                continue
            mine = self._running = (call, time.perf_counter())
            scores = _attempt(call)
            with self._lock:
                if self._running is not mine:
                    return  # the call timed out, and another thread has taken over
                self._running = None
            self._conclude(call, scores)

    def _conclude(self, call: Call, scores: tuple[Score, ...]) -> None:
        seconds = call.conclude(scores)
        if seconds is not None and not call.receiver.is_cancelled:
            self._loop.call_later(seconds, self.submit, call)


def _attempt(call: Call) -> tuple[Score, ...]:
    start = time.perf_counter()
    try:
        result = call.invoke()
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError(
                f"the sync reward {call.reward.name!r} returned a coroutine; define it with "
                "async def, or run the coroutine in it"
            )
        return call.as_scores(result, time.perf_counter() - start)
    except BaseException as error:  # user code may raise anything, and the thread must continue
        return call.failed(error, time.perf_counter() - start)


class Runners:
    """The threads and the event loop of one start of the rewards."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.is_closed = False
        self._loop = AsyncRunner()
        self._threads = {
            reward.name: SyncRunner(reward, self._loop) for reward in rewards if not reward.is_async
        }

    def submit(self, call: Call) -> None:
        """Schedule a call in the thread or on the loop of its reward."""
        if self.is_closed:
            raise RuntimeError("the rewards are closed, so nothing can be scored any more")
        self._threads.get(call.reward.name, self._loop).submit(call)

    def run_hook(self, hook: Callable[..., Any], *arguments: object) -> None:
        """Call a hook of a reward; run an async hook on the event loop that runs its scoring."""
        if inspect.iscoroutinefunction(hook):
            self._loop.run(hook(*arguments))
        else:
            hook(*arguments)

    def expire(self) -> float | None:
        """Give up on sync calls that have timed out; return the seconds until the next timeout.

        None means that no reward has a timeout.
        """
        if self.is_closed:
            return None
        waits = [one.expire() for one in self._threads.values()]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def close(self, hooks: Sequence[Callable[[], Any]]) -> None:
        """Cancel what is pending, run the closing hooks and end, within about 2 seconds."""
        self.is_closed = True
        for thread in self._threads.values():
            thread.close()
        for hook in hooks:
            if not inspect.iscoroutinefunction(hook):
                try:
                    hook()
                except Exception:
                    _log.warning("%s failed", hook.__qualname__, exc_info=True)
        self._loop.close([hook for hook in hooks if inspect.iscoroutinefunction(hook)])
