"""Runs without progress: what is reported, and what ends them."""

import json
import time
from dataclasses import replace

import psutil
import pytest
from cli_base import BASE
from paths import SUPPORT
from processes import LIT_GRPO, running

from lit_grpo.runs.events import read_events
from lit_grpo.runs.watchdog import Look, StallWatchdog, Watch
from lit_grpo.stopping import ExitCode
from lit_grpo.types import RunningStage, Stage, StageProgress

START = Look(
    time=100.0,
    num_ended=3,
    stage=RunningStage(name="generation", started=99.0),
    progress=StageProgress(total=8),
    is_paused=False,
)


def watched(*looks: tuple[float, dict]) -> Watch:
    """Return a watch that has seen the start, and then what has changed by each time."""
    watch, look = Watch(START), START
    for seconds, changes in looks:
        look = replace(look, time=100.0 + seconds, **changes)
        watch.take(look)
    return watch


def tokens(number: int, num_done: int = 0) -> dict:
    return {"progress": StageProgress(total=8, num_done=num_done, num_tokens=number)}


def test_a_stage_whose_counts_do_not_advance_has_stalled_and_is_reported_ever_more_rarely():
    watch = watched((10, tokens(5)), (40, {}))
    assert watch.quiet_seconds == 30
    assert not watch.is_stall_due(30)
    assert watch.is_stall_due(29)
    assert not watch.is_stall_due(29)
    watch.take(replace(watch.look, time=169.0))
    assert watch.is_stall_due(29)


@pytest.mark.parametrize(
    "change",
    [
        tokens(6),
        tokens(5, num_done=1),
        {"num_ended": 4},
        {"stage": None},
        {"stage": RunningStage(name="generation", started=130.0)},
        {"is_paused": True},
    ],
    ids=["a token", "a completion", "an end", "no stage", "the next stage", "a pause"],
)
def test_any_advance_and_the_pause_of_an_outage_are_no_stall(change):
    watch = watched((10, tokens(5)), (40, change), (50, {}))
    assert watch.quiet_seconds == (0 if "is_paused" in change else 10)


def test_a_stage_that_advances_for_long_is_slow_and_its_end_is_estimated():
    watch = watched((100, tokens(500)), (200, tokens(900)))
    assert not watch.is_stall_due(150)
    assert watch.is_slow_due(150)
    assert not watch.is_slow_due(150)
    assert watch.describe_slow("stage generation of rollout step 0", 1000) == (
        "Stage generation of rollout step 0 is slow but advances, for 0:03:20 now, at 0 of 8 "
        "completions and 900 tokens. It takes at most 0:26:17 more."
    )
    watch.take(replace(watch.look, time=400.0, **tokens(2000, num_done=2)))
    assert watch.describe_slow("it", 1000).endswith("It may take 0:15:00 more.")


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


def train(directory, watchdog: dict, *callbacks: dict, reward: str, max_steps: int = 1, **given):
    """Run `fit` in a process; return its exit code and what it said."""
    exit_code, said, _ = train_ranks(
        directory, {"max_steps": max_steps}, watchdog, *callbacks, reward=reward, **given
    )
    return exit_code, said


def train_ranks(directory, trainer: dict, watchdog: dict, *callbacks: dict, reward: str, **given):
    """Return also the processes of further ranks that live on although the first has ended."""
    config = json.loads(json.dumps(BASE))
    callbacks = ({"class_path": "StallWatchdog", "init_args": watchdog}, *callbacks)
    config["trainer"] |= {"callbacks": list(callbacks), **trainer}
    config["model"]["rewards"] = [{"class_path": f"holds.{reward}", "init_args": given}]
    config["model"]["group_size"] = 20
    (directory / "run.json").write_text(json.dumps(config))
    words = [*LIT_GRPO, "fit", "--config", "run.json", "--run_dir", "run"]
    said, ranks = directory / "said.txt", []
    with running(words, directory, said=said, PYTHONPATH=str(SUPPORT)) as process:
        while len(ranks) < trainer.get("devices", 1) - 1 and process.poll() is None:
            ranks = psutil.Process(process.pid).children()
            time.sleep(0.1)
        exit_code = process.wait(300)
        _, alive = psutil.wait_procs(ranks, timeout=60)
    return exit_code, said.read_text(), alive


DEADLOCK = "It looks like a deadlock, or a wait for something that does not answer"


@pytest.mark.slow
def test_a_reward_that_deadlocks_ends_the_run_with_its_own_code_and_a_checkpoint(tmp_path):
    watchdog = {"action": "stop", "min_seconds": 4, "first_seconds": 4}
    exit_code, said = train(
        tmp_path, watchdog, reward="DeadlockedReward", max_steps=3, call=50, name="stuck"
    )
    assert exit_code == ExitCode.STALLED, said
    assert "in stage reward of rollout step 1, at 9 of 40 completions" in said
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
def test_a_process_whose_main_thread_is_stuck_is_ended(tmp_path):
    watchdog = {"action": "stop", "min_seconds": 4, "first_seconds": 4}
    stuck = {"class_path": "holds.DeadlockMainThread", "init_args": {"step": 1}}
    exit_code, said = train(tmp_path, watchdog, stuck, reward="ShareOfLowBytes")
    assert exit_code == ExitCode.STALLED, said
    assert "No progress for" in said
    assert "rollout step 0, between two stages" in said
    assert "Its main thread is stuck, so the process ends here" in said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_which_one_is_stuck_are_ended(rank, tmp_path):
    trainer = {"devices": 2, "strategy": "ddp", "max_steps": 3}
    watchdog = {"action": "stop", "min_seconds": 4, "first_seconds": 8}
    stuck = {"class_path": "holds.DeadlockMainThread", "init_args": {"step": 1, "rank": rank}}
    exit_code, said, alive = train_ranks(
        tmp_path, trainer, watchdog, stuck, reward="ShareOfLowBytes"
    )
    assert exit_code == ExitCode.STALLED, said
    assert not alive
    for name in ("run.log", "run_rank1.log"):
        log = (tmp_path / "run" / name).read_text()
        assert "Its main thread is stuck, so the process ends here" in log


@pytest.mark.slow
def test_a_slow_first_step_that_advances_is_not_stopped(tmp_path):
    watchdog = {"action": "stop", "min_seconds": 10, "first_seconds": 10}
    exit_code, said = train(tmp_path, watchdog, reward="SlowReward")
    assert exit_code == 0, said
    assert "Stage reward of rollout step 0 is slow but advances, for 0:00:1" in said
    assert " of 40 completions" in said
    assert "more." in said
    assert DEADLOCK not in said
