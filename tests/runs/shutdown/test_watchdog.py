"""Runs without progress: what is reported, and what ends them."""

import json
import signal
import time

import psutil
import pytest
from cli_base import BASE
from worker_processes import wait_until

from lit_grpo.runs.checkpoints.files import last_checkpoint
from lit_grpo.runs.files.events import read_events
from lit_grpo.runs.shutdown.watchdog import StallWatchdog
from lit_grpo.stopping import ExitCode
from lit_grpo.types import Stage


def test_the_allowed_time_follows_the_longest_stage_of_a_kind():
    watchdog = StallWatchdog()
    assert watchdog._allowed_seconds("reward") == 1800
    for seconds, allowed in ((2.0, 300), (100.0, 500), (3.0, 500)):
        watchdog.on_stage_end(None, None, Stage(name="reward", seconds=seconds))
        assert watchdog._allowed_seconds("reward") == allowed
    assert watchdog._allowed_seconds("generation") == 1800


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"min_seconds": 0},
            "min_seconds must be positive, got 0. Set StallWatchdog.init_args",
        ),
        ({"first_seconds": 5}, "first_seconds must be >= 300, got 5"),
        ({"factor": 0.5}, "factor must be >= 1, got 0.5"),
    ],
)
def test_a_setting_that_is_out_of_range_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        StallWatchdog(**setting)


def train(importer, directory, watchdog: dict, *callbacks: dict, max_steps: int = 1, **settings):
    """Run `fit` in a process; return its exit code and what it said."""
    exit_code, said, _ = train_ranks(
        importer, directory, {"max_steps": max_steps}, watchdog, *callbacks, **settings
    )
    return exit_code, said


def train_ranks(
    importer,
    directory,
    trainer: dict,
    watchdog: dict,
    *callbacks: dict,
    reward: str,
    held: str = "",
    **given,
):
    """Return also the processes of further ranks that live on although the first has ended.

    The first gets SIGTERM when there is a file of the name ``held``.
    """
    config = json.loads(json.dumps(BASE))
    callbacks = ({"class_path": "StallWatchdog", "init_args": watchdog}, *callbacks)
    config["trainer"] |= {"callbacks": list(callbacks), **trainer}
    config["model"]["rewards"] = [{"class_path": f"holds.{reward}", "init_args": given}]
    config["model"]["group_size"] = 20
    (directory / "run.json").write_text(json.dumps(config))
    num_ranks, ranks = trainer.get("devices", 1), []
    words = [str(num_ranks), "fit", "--config", "run.json", "--run_dir", "run"]
    with importer.running(words, directory, program="forked_program") as started:
        (process,) = started.processes
        while len(ranks) < num_ranks - 1 and process.poll() is None:
            ranks = psutil.Process(process.pid).children()
            time.sleep(0.1)
        if held:
            wait_until(lambda: (directory / held).exists() or process.poll() is not None, 240)
            process.send_signal(signal.SIGTERM)
        exit_code = process.wait(300)
        _, alive = psutil.wait_procs(ranks, timeout=60)
    return exit_code, (directory / "said.txt").read_text(), alive


DEADLOCK = "It looks like a deadlock, or a wait for something that does not answer"


@pytest.mark.slow
def test_a_reward_that_deadlocks_ends_the_run_with_its_own_code_and_a_checkpoint(
    tmp_path, importer
):
    watchdog = {"action": "stop", "min_seconds": 4, "first_seconds": 4}
    exit_code, said = train(
        importer, tmp_path, watchdog, reward="DeadlockedReward", max_steps=3, call=50, name="stuck"
    )
    assert exit_code == ExitCode.STALLED, said
    assert "in stage reward of rollout step 2, at 9 of 40 completions" in said
    assert DEADLOCK in said
    assert "Completions without a score: stuck " in said
    assert "Without timeout_seconds: stuck." in said
    assert "Stopped after 1 rollout step. No progress for" in said
    assert (tmp_path / "run/checkpoints/step_000001.ckpt").exists()
    log = (tmp_path / "run/run.log").read_text()
    assert "Thread MainThread:" in log
    assert "Thread reward-stuck:" in log
    assert "self._lock.acquire()" in log
    assert "self._lock.acquire()" not in said
    stalls = [event for event in read_events(tmp_path / "run") if event.kind == "stall"]
    assert stalls
    assert DEADLOCK in stalls[-1].message


@pytest.mark.slow
def test_a_process_whose_main_thread_is_stuck_is_ended(tmp_path, importer):
    watchdog = {"action": "stop", "min_seconds": 4, "first_seconds": 4}
    stuck = {"class_path": "holds.DeadlockMainThread", "init_args": {"step": 1}}
    exit_code, said = train(importer, tmp_path, watchdog, stuck, reward="ShareOfLowBytes")
    assert exit_code == ExitCode.STALLED, said
    assert "No progress for" in said
    assert "rollout step 1, between two stages" in said
    assert "Its main thread is stuck, or waits for a rank that is" in said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_which_one_is_stuck_are_ended(rank, tmp_path, importer):
    trainer = {"devices": 2, "strategy": "ddp", "max_steps": 3}
    watchdog = {"action": "stop", "min_seconds": 4, "first_seconds": 8}
    stuck = {"class_path": "holds.DeadlockMainThread", "init_args": {"step": 1, "rank": rank}}
    exit_code, said, alive = train_ranks(
        importer, tmp_path, trainer, watchdog, stuck, reward="ShareOfLowBytes"
    )
    assert exit_code == ExitCode.STALLED, said
    assert not alive
    log = (tmp_path / "run" / ("run_rank1.log" if rank else "run.log")).read_text()
    assert "Its main thread is stuck, or waits for a rank that is" in log


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 1])
def test_a_signal_ends_ranks_that_are_stuck_or_wait_for_one_although_the_watchdog_only_warns(
    rank, tmp_path, importer
):
    trainer = {"max_steps": 3} | ({} if rank is None else {"devices": 2, "strategy": "ddp"})
    watchdog = {"min_seconds": 4, "first_seconds": 8}
    stuck = {"class_path": "holds.DeadlockMainThread", "init_args": {"step": 2, "rank": rank}}
    stuck["init_args"]["patience_seconds"] = 2.0
    exit_code, said, alive = train_ranks(
        importer,
        tmp_path,
        trainer,
        watchdog,
        stuck,
        reward="ShareOfLowBytes",
        held=f"held{rank or 0}",
    )
    assert exit_code == 128 + signal.SIGTERM, said
    assert not alive
    if rank is None:  # in a collective, Python does not call a handler
        assert "SIGTERM: ending with a checkpoint" in said
    assert "Its main thread is stuck, or waits for a rank that is" in said
    assert last_checkpoint(tmp_path / "run").resolve().name == "step_000001.ckpt"


@pytest.mark.slow
def test_a_slow_first_step_that_advances_is_not_stopped(tmp_path, importer):
    watchdog = {"action": "stop", "min_seconds": 4, "first_seconds": 4}
    exit_code, said = train(importer, tmp_path, watchdog, reward="SlowReward")
    assert exit_code == 0, said
    assert "Stage reward of rollout step 1 is slow but advances, for 0:00:0" in said
    assert " of 40 completions" in said
    assert "more." in said
    assert DEADLOCK not in said
