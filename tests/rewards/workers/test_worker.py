"""A worker answers calls, here in this process, and ends with its trainer."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import time
from pathlib import Path

import pytest
from forked import receive, start_process
from paths import SUPPORT
from worker_processes import guards_of, is_alive, is_busy, wait_until, workers_of

from lit_grpo.rewards.workers.pool import WorkerPool
from lit_grpo.rewards.workers.worker import MAX_ERROR_CHARACTERS, answer_call

FUNCTIONS = SUPPORT / "worker_functions.py"
FINE = "value = 1.5"
SETTINGS = {"num_workers": 1, "deadline_seconds": 60, "max_memory_gb": 1}


def answer_to(*call: object, file: Path = FUNCTIONS) -> dict[str, object]:
    return json.loads(answer_call(str(file), pickle.dumps(call)))


def test_the_answer_is_the_result_of_a_function_of_the_file():
    assert answer_to("run", "value = [1.5, None, 'é']") == {"result": [1.5, None, "é"]}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (["run", "raise ValueError('no number')"], "ValueError: no number"),
        (["run", "raise SystemExit(3)"], "SystemExit: 3"),
        (["run", "raise KeyboardInterrupt"], "KeyboardInterrupt: "),
        (["run", "value = {1, 2}"], "TypeError: Object of type set is not JSON serializable"),
        (["walk"], "KeyError: 'walk'"),
        (["run"], "TypeError: run() missing 1 required positional argument: 'code'"),
    ],
)
def test_whatever_fails_is_answered_as_an_error(call, error):
    assert answer_to(*call) == {"error": error}


def test_a_call_that_cannot_be_read_is_answered_as_an_error():
    answer = json.loads(answer_call(str(FUNCTIONS), b"no pickle"))
    assert answer["error"].startswith("UnpicklingError: ")


def test_a_long_error_is_cut_off():
    answer = answer_to("run", "raise ValueError('x' * 9999)")
    assert len(answer["error"]) == MAX_ERROR_CHARACTERS


def test_a_file_is_loaded_once(tmp_path):
    file = tmp_path / "counts.py"
    file.write_text("calls = []\ndef count():\n    calls.append(1)\n    return len(calls)\n")
    assert [answer_to("count", file=file)["result"] for _ in range(3)] == [1, 2, 3]


def children_of(pid):
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def train(how, ready):
    """Act as a trainer that does not get to close its pool."""
    os.setsid()

    async def run():
        pool = WorkerPool(FUNCTIONS, ("run", FINE), **SETTINGS)
        await pool.start()
        if how == "busy":
            code = "import subprocess; subprocess.Popen(['sleep', '600'])\n9 ** 9 ** 9"
            asyncio.create_task(pool.call("run", code))
        if how == "forks":
            if not os.fork():
                time.sleep(600)
            await pool.close()
        ready.send("ready")
        await asyncio.sleep(600)

    asyncio.run(run())


@pytest.fixture
def start_trainer():
    """Start trainers, which are killed at the end with all processes of their sessions."""
    trainers = []

    def start(how):
        trainer, messages = start_process(lambda ready: train(how, ready))
        trainers.append(trainer)
        assert receive(messages) == "ready"
        return trainer

    yield start
    for one in trainers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.join()


@pytest.mark.parametrize("how", ["idle", "busy"])
def test_no_process_is_left_when_the_trainer_is_killed(start_trainer, how):
    trainer = start_trainer(how)
    (guard,), (worker,) = guards_of(trainer.pid), workers_of(trainer.pid)
    family = {guard, worker}
    if how == "busy":
        wait_until(lambda: children_of(worker) and is_busy(worker))
        family |= children_of(worker)
    trainer.kill()
    wait_until(lambda: not any(map(is_alive, family)))


def test_workers_end_even_if_a_forked_process_of_the_trainer_holds_their_pipes(start_trainer):
    trainer = start_trainer("forks")
    wait_until(lambda: not guards_of(trainer.pid))
