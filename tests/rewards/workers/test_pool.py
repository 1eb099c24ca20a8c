import asyncio
import os
import signal

import pytest
from paths import SUPPORT
from worker_processes import guards_of, is_alive, is_busy, wait_until, workers_of

from lit_grpo.rewards.workers.pool import WorkerError, WorkerPool, WorkerStartError

FUNCTIONS = SUPPORT / "worker_functions.py"
FINE = "value = 1.5"
SETTINGS = {"num_workers": 1, "deadline_seconds": 60, "max_memory_gb": 1}


def with_pool(scene, first="value = 0", **settings):
    """Run a scene with a pool, which is closed at the end."""

    async def run():
        pool = WorkerPool(FUNCTIONS, ("run", first), **(SETTINGS | settings))
        try:
            return await scene(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def results(*codes, **settings):
    """Call ``run`` with each code at the same time; return the results and exceptions."""

    async def call_all(pool):
        calls = (pool.call("run", code) for code in codes)
        return await asyncio.gather(*calls, return_exceptions=True)

    return with_pool(call_all, **settings)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os.kill(process, 9)", "exit code 137, SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "exit code 139, SIGSEGV"),
        ("import os; os.fork() or os.setsid() or __import__('time').sleep(3); os._exit(4)",
         "exit code 4"),
    ],
)  # fmt: skip
def test_a_crash_is_an_error_of_that_call_and_the_worker_is_replaced(code, cause):
    before, crashed, after = results(FINE, code, FINE)
    assert isinstance(crashed, WorkerError)
    assert str(crashed) == f"the worker died ({cause})"
    assert (before, after) == (1.5, 1.5)


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("value = bytearray(2**31)", "MemoryError"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(): f()\nf()", "RecursionError"),
        ("value = 1 +", "SyntaxError"),
        ("value = {1, 2}", "not JSON serializable"),
    ],
)
def test_an_exception_is_an_error_of_that_call_and_the_worker_goes_on(code, detail):
    before, raised, after = results("value = process", code, "value = process")
    assert isinstance(raised, WorkerError)
    assert detail in str(raised)
    assert before == after


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "9 ** 9 ** 9",  # in C, without letting any other thread run
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_a_call_that_hangs_times_out_and_the_worker_is_replaced(code):

    async def hang_and_go_on(pool):
        calls = pool.call("run", code), pool.call("run", FINE, has_deadline=False)
        return await asyncio.gather(*calls, return_exceptions=True)

    hung, after = with_pool(hang_and_go_on, deadline_seconds=1)
    assert isinstance(hung, TimeoutError)
    assert str(hung) == "no answer within 1 s (deadline_seconds); the worker was killed"
    assert after == 1.5


def test_child_processes_of_a_call_that_hangs_are_killed_with_it(tmp_path):
    code = (
        "import pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    (hung,) = results(code, deadline_seconds=4)
    assert isinstance(hung, TimeoutError)
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(child))


def test_a_call_may_have_no_deadline():
    async def sleep(pool):
        return await pool.call("run", "import time; time.sleep(0.2)", has_deadline=False)

    assert with_pool(sleep, deadline_seconds=0.05) is None


@pytest.mark.parametrize(
    "code",
    [
        "print('{\"result\": 0}' * 9999, flush=True); value = 1.5",
        "import os; os.write(1, b'x' * 99); os.write(2, b'y'); value = 1.5",
        "import os; os.system('echo 0'); value = 1.5",
        "import sys; value = 1.5 + len(sys.stdin.read())",
        "import subprocess; value = 1.5 + len(subprocess.run('cat', capture_output=True).stdout)",
        "import os; os.fork(); value = 1.5",
        "import signal; signal.alarm(600); signal.alarm(0); value = 1.5",
        "from multiprocessing import get_context\n"
        "child = get_context('fork').Process(target=int)\n"
        "child.start(); child.join(); value = 1.5 + child.exitcode",
    ],
)
def test_what_code_prints_reads_and_starts_does_not_change_the_results(code):
    assert results(code, "value = 2.5", FINE) == [1.5, 2.5, 1.5]


def test_a_worker_that_dies_between_two_calls_fails_no_call():
    async def kill_between_calls(pool):
        worker = await pool.call("run", "value = process")
        os.kill(worker, signal.SIGKILL)
        (idle,) = pool._idle
        await until(lambda: not idle.is_alive)
        return worker, await pool.call("run", "value = process")

    first, second = with_pool(kill_between_calls)
    assert first != second


def test_several_workers_run_side_by_side_and_one_may_crash(tmp_path):
    meet = (
        "import pathlib, time\n"
        "here, there = (pathlib.Path({folder!r}) / name for name in {names})\n"
        "here.touch()\n"
        "while not there.exists(): time.sleep(0.01)\n"
        "value = 1.0\n"
    )
    one = meet.format(folder=str(tmp_path), names=("a", "b"))
    other = meet.format(folder=str(tmp_path), names=("b", "a"))
    first, second, crashed, *rest = results(
        *(one, other, "import os; os._exit(1)", *[FINE] * 8), num_workers=2
    )
    assert (first, second) == (1.0, 1.0)
    assert isinstance(crashed, WorkerError)
    assert rest == [1.5] * 8


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_belong_to_their_calls_with_any_number_of_workers(num_workers):
    codes = [f"value = {number} / 7" for number in range(20)]
    assert results(*codes, num_workers=num_workers) == [number / 7 for number in range(20)]


def test_workers_start_when_they_are_needed_and_end_with_the_pool():
    others = guards_of(os.getpid())

    async def count_workers(pool):
        counts = [len(guards_of(os.getpid()) - others)]
        await pool.start()
        counts.append(len(guards_of(os.getpid()) - others))
        await asyncio.gather(*(pool.call("run", FINE) for _ in range(4)))
        counts.append(len(guards_of(os.getpid()) - others))
        return counts

    assert with_pool(count_workers, num_workers=2) == [0, 1, 2]
    wait_until(lambda: guards_of(os.getpid()) <= others)


def test_a_worker_that_cannot_start_is_an_error_and_leaves_nothing():
    others = guards_of(os.getpid())
    with pytest.raises(WorkerStartError, match="a worker could not start: ValueError: no sandbox"):
        with_pool(lambda pool: pool.start(), first="raise ValueError('no sandbox')")
    wait_until(lambda: guards_of(os.getpid()) <= others)


def test_closing_kills_a_call_that_runs():
    others, other_workers = guards_of(os.getpid()), workers_of(os.getpid())

    async def close_while_busy(pool):
        await pool.start()
        (worker,) = workers_of(os.getpid()) - other_workers
        call = asyncio.create_task(pool.call("run", "while True: pass"))
        await until(lambda: is_busy(worker))
        await pool.close()
        await until(lambda: not is_alive(worker))
        with pytest.raises(WorkerError):
            await call

    with_pool(close_while_busy)
    wait_until(lambda: guards_of(os.getpid()) <= others)
