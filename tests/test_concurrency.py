from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue

import pytest
from worker_processes import wait_until

from lit_grpo import concurrency
from lit_grpo.concurrency import (
    EventLoopThread,
    backoff,
    call_with_timeout,
    gather_or_cancel,
    run_in_daemon_thread,
    take_from,
    wait_for,
)


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_the_wait_doubles_up_to_a_maximum_and_has_jitter(monkeypatch, factor):
    monkeypatch.setattr(
        concurrency.jitter, "uniform", lambda low, high: {0.5: low, 1.5: high}[factor]
    )
    waits = [backoff(failures, first=1.0, longest=5.0) for failures in (1, 2, 3, 4, 9)]
    assert waits == [factor * seconds for seconds in (1.0, 2.0, 4.0, 5.0, 5.0)]


async def later(value: int, seconds: float) -> int:
    await asyncio.sleep(seconds)
    return value


def test_gathered_results_are_in_the_order_of_the_coroutines():
    assert asyncio.run(gather_or_cancel([later(1, 0.02), later(2, 0.0)])) == [1, 2]


def test_when_one_coroutine_fails_the_others_are_cancelled_and_awaited():
    events = []

    async def slow():
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    async def fail():
        raise ZeroDivisionError

    async def run():
        with pytest.raises(ZeroDivisionError):
            await gather_or_cancel([slow(), fail()])
        events.append("returned")

    asyncio.run(run())
    assert events == ["cleaned up", "returned"]


def test_a_daemon_thread_passes_on_results_and_exceptions():
    thread = run_in_daemon_thread(threading.current_thread, "a name").result(60)
    assert (thread.name, thread.daemon) == ("a name", True)
    with pytest.raises(ZeroDivisionError):
        run_in_daemon_thread(lambda: 1 // 0, "test").result(60)


def test_a_call_with_a_timeout_returns_and_raises_what_the_call_does():
    assert call_with_timeout(lambda: 7, 60, "test") == 7
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(lambda: 1 // 0, 60, "test")


def test_a_timeout_that_the_call_itself_raises_is_passed_on():
    def call():
        raise TimeoutError("of the call")

    with pytest.raises(TimeoutError, match="of the call"):
        call_with_timeout(call, 60, "test")


def test_a_call_that_takes_too_long_is_abandoned():
    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within 0.01 s"):
        call_with_timeout(never.wait, 0.01, "test")
    never.set()


@pytest.fixture
def loop():
    thread = EventLoopThread("test")
    yield thread
    thread.close(60)


def test_the_loop_of_a_thread_is_the_same_for_every_call(loop):
    async def running_loop():
        return asyncio.get_running_loop()

    assert loop.run(running_loop()) is loop.submit(running_loop()).result(60) is loop.loop


def test_a_coroutine_that_takes_longer_than_its_timeout_raises(loop):
    with pytest.raises(TimeoutError):
        loop.run(asyncio.sleep(600), timeout=0.01)


def test_closing_cancels_what_runs_lets_it_clean_up_and_ends_the_thread():
    thread, started, cleaned = EventLoopThread("test"), threading.Event(), threading.Event()

    async def work():
        started.set()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    future = thread.submit(work())
    assert started.wait(60)
    thread.close(60)
    assert cleaned.is_set()
    assert future.cancelled()
    assert thread.loop.is_closed()


def test_a_thread_that_is_stuck_is_abandoned():
    thread, started, released = EventLoopThread("test"), threading.Event(), threading.Event()

    async def block():
        started.set()
        released.wait(60)

    thread.submit(block())
    assert started.wait(60)
    thread.close(0.01)
    assert thread._thread.is_alive()
    released.set()
    thread._thread.join(60)


def is_within(function, thread: int) -> bool:
    """Return whether a thread is in a call of a function."""
    frame = sys._current_frames()[thread]
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("wait", "source"), [(wait_for, Future()), (take_from, SimpleQueue())])
def test_ctrl_c_that_another_thread_receives_ends_a_wait_soon(wait, source):
    main, is_over = threading.get_ident(), threading.Event()

    def interrupt():
        wait_until(lambda: is_within(wait, main))
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # as the kernel may do
        is_over.wait(30)

    threading.Thread(target=interrupt, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait(source)
    assert time.monotonic() - start < 15
    is_over.set()


def test_waiting_for_a_result_ends_with_it_or_after_the_timeout():
    assert wait_for(run_in_daemon_thread(lambda: 3, "test")) == 3
    with pytest.raises(TimeoutError):
        wait_for(Future(), timeout=0.1)
    with pytest.raises(ZeroDivisionError):
        wait_for(run_in_daemon_thread(lambda: 1 // 0, "test"))


def test_a_wait_may_be_left_and_cancels_what_it_waits_for():
    loop = EventLoopThread("test")
    future = loop.submit(asyncio.sleep(100))
    with pytest.raises(ZeroDivisionError):
        wait_for(future, on_wait=lambda: 1 // 0)
    assert future.cancelled()
    loop.close()
