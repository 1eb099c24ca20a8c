"""Back-off between retries, threads with a timeout, and event loops in threads."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

WAKE_SECONDS = 0.5
"""Longest time for which a waiting thread does not look for signals."""

jitter = random.Random()
"""Separate from the global generator, whose numbers must depend on the run's seed only."""


def backoff(num_failures: int, first: float, longest: float) -> float:
    """Return the seconds to wait before the next attempt.

    That is ``first`` after one failure, twice as long after each further one, at most ``longest``,
    times a random factor from 0.5 to 1.5, so that calls that failed together are not repeated
    together.
    """
    seconds: float = min(first * 2 ** (num_failures - 1), longest)
    return seconds * jitter.uniform(0.5, 1.5)


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order; if one fails, cancel the others and wait for them to end."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_in_daemon_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a thread that never keeps the process from exiting."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a running call cannot be cancelled

    def work() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def is_done(future: Future[Any], seconds: float) -> bool:
    """Wait for at most so many seconds; return whether there is a result."""
    wait([future], seconds)
    return future.done()


def wait_for(
    future: Future[T],
    timeout: float | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> T:
    """Return the result of a future, as ``future.result`` does, and stay open to signals.

    The kernel may hand a signal to another thread, and then the main thread sees it only when it
    wakes: a Ctrl-C would wait for the result.

    Args:
        on_wait: Called whenever the thread wakes. What it raises cancels the future.

    Raises:
        TimeoutError: there is no result after ``timeout`` seconds.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    while not future.done() and (left := end - time.monotonic()) > 0:
        if not is_done(future, min(left, WAKE_SECONDS)):
            try:
                on_wait()
            except BaseException:
                future.cancel()
                raise
    return future.result(0)


def take_from(queue: SimpleQueue[T]) -> T:
    """Return the next item of a queue, and stay open to signals like ``wait_for``."""
    while True:
        with suppress(Empty):
            return queue.get(timeout=WAKE_SECONDS)


def call_with_timeout(function: Callable[[], T], seconds: float, name: str) -> T:
    """Call a function in a daemon thread and return its result; abandon the thread on a timeout.

    Raises:
        TimeoutError: the call took longer than ``seconds``.
        BaseException: what the function raised.
    """
    future = run_in_daemon_thread(function, name)
    try:
        return wait_for(future, seconds)
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None


class EventLoopThread:
    """An event loop in a daemon thread, which lets several calls use the same async clients."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result."""
        return wait_for(self.submit(coroutine), timeout)

    def close(self, timeout: float | None = None) -> None:
        """Cancel the tasks that still run and end the thread; abandon it after ``timeout``."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)

    def _run(self) -> None:
        self.loop.run_forever()
        if left := asyncio.all_tasks(self.loop):
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()
