"""Runs of two ranks that leave together, whatever each of them does, and go on bit-identically."""

import os
import signal
from collections.abc import Callable
from copy import deepcopy
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

import pytest
from forked_ranks import Importer, Ranks
from needs import needs_deepspeed
from stopped_runs import (
    HELD_STEP,
    NEVER_READY,
    assert_same_runs,
    begin,
    config,
    finish,
    held_reward,
    hold,
    said,
    saved_step,
    with_server,
    words,
)
from worker_processes import wait_until

from lit_grpo.runs.checkpoints.files import why_unusable
from lit_grpo.stopping import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DDP = {"devices": 2, "strategy": "ddp"}
ON_ONE_RANK = held_reward(num_ranks=2, rank=1)
PLACES = {
    "generation": config(hold("generation"), **DDP),
    "evaluation": config(hold("evaluation"), **DDP),
    "a reward on one rank": config(reward=ON_ONE_RANK, **DDP),
}


def both(importer: Importer, directory: Path, *more: str):
    return importer.running(words(*more), directory, num_ranks=2)


@pytest.fixture(scope="module")
def whole(importer, tmp_path_factory) -> Path:
    directory = begin(tmp_path_factory.mktemp("whole"), config(**DDP))
    finish(importer, directory, num_ranks=2)
    return directory


def wait_for(condition, ranks: Ranks, directory: Path) -> None:
    wait_until(lambda: condition() or not ranks.are_running(), 240)
    assert ranks.are_running(), said(directory, 0) + said(directory, 1)


def wait_until_held(ranks: Ranks, directory: Path, held: tuple[int, ...] = (0, 1)) -> None:
    files = [directory / f"held{rank}" for rank in held]
    wait_for(lambda: all(file.exists() for file in files), ranks, directory)


def assert_left(ranks: Ranks, directory: Path, *, step: int = HELD_STEP) -> None:
    """Check that SIGTERM to a rank has ended both, with a checkpoint of the steps before."""
    (directory / "signalled").touch()
    assert ranks.wait() == [128 + signal.SIGTERM, 0], said(directory, 0) + said(directory, 1)
    assert f"Ended by SIGTERM after {step} rollout steps." in said(directory, 0)
    assert saved_step(directory) == step


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_to_one_rank_leaves_what_both_do(place, tmp_path, importer, whole):
    directory = begin(tmp_path / "run", PLACES[place])
    held = (1,) if place == "a reward on one rank" else (0, 1)
    with both(importer, directory) as ranks:
        wait_until_held(ranks, directory, held)
        os.kill(ranks.pids[0], signal.SIGTERM)
        assert_left(ranks, directory)
    finish(importer, directory, num_ranks=2)
    assert_same_runs(directory, whole)


def leave_outage(importer: Importer, path: Path, **trainer) -> Path:
    """Leave the pause of an outage that one rank has."""
    down = held_reward("DownReward", num_ranks=2, rank=1, on_error="mask")
    settings = config(reward=down, **trainer)
    settings["model"]["outage"] = {"max_absent_fraction": 0.0, "first_pause_seconds": 300}
    directory = begin(path, settings)
    with both(importer, directory) as ranks:
        wait_for(lambda: "Retrying in 300 s" in said(directory, 0), ranks, directory)
        os.kill(ranks.pids[0], signal.SIGTERM)
        assert_left(ranks, directory)
    return directory


def leave_server(importer: Importer, path: Path, step: int = HELD_STEP, **trainer) -> None:
    """Leave the wait for a server: at step 0 for its start, else for its update of the weights."""
    program = {} if step else {"program": NEVER_READY}
    directory = begin(path, with_server(step, **program, **trainer))
    with both(importer, directory) as ranks:
        wait_until_held(ranks, directory)
        os.kill(ranks.pids[1], signal.SIGTERM)
        assert_left(ranks, directory, step=step)


def leave_stalled(importer: Importer, path: Path, **trainer) -> Path:
    """Leave at the word of the watchdog, as one rank scores for ever."""
    settings = {"action": "stop", "min_seconds": 8, "first_seconds": 30}
    watchdog = {"class_path": "StallWatchdog", "init_args": settings}
    directory = begin(path, config(watchdog, reward=ON_ONE_RANK, **trainer))
    with both(importer, directory) as ranks:
        assert ranks.wait() == [ExitCode.STALLED, 0], said(directory, 0) + said(directory, 1)
    assert saved_step(directory) == HELD_STEP
    return directory


def test_a_signal_leaves_the_pause_of_an_outage_that_one_rank_has(tmp_path, importer, whole):
    directory = leave_outage(importer, tmp_path / "run", **DDP)
    finish(importer, directory, num_ranks=2)
    assert_same_runs(directory, whole)


@pytest.fixture(scope="module")
def wholes(importer, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that makes an undisturbed run under a strategy, once."""

    @cache
    def whole(strategy: str) -> Path:
        settings = config(devices=2, strategy=strategy)
        directory = begin(tmp_path_factory.mktemp("whole"), settings)
        finish(importer, directory, num_ranks=2)
        return directory

    return whole


SHARED = [
    ("fsdp2", "generation"),
    ("fsdp2", "a reward on one rank"),
    ("fsdp2", "evaluation"),
    pytest.param("deepspeed_stage_2", "generation", marks=needs_deepspeed),
    pytest.param("deepspeed_stage_1", "a reward on one rank", marks=needs_deepspeed),
    pytest.param("deepspeed_stage_3", "evaluation", marks=needs_deepspeed),
]


@pytest.mark.parametrize(("strategy", "place"), SHARED)
def test_ranks_that_share_a_model_leave_and_go_on(strategy, place, tmp_path, importer, wholes):
    settings = deepcopy(PLACES[place])
    settings["trainer"] |= {"strategy": strategy}
    directory = begin(tmp_path / "run", settings)
    held = (1,) if place == "a reward on one rank" else (0, 1)
    with both(importer, directory) as ranks:
        wait_until_held(ranks, directory, held)
        os.kill(ranks.pids[0], signal.SIGTERM)
        assert_left(ranks, directory)
    finish(importer, directory, num_ranks=2)
    assert_same_runs(directory, wholes(strategy))


WRITING = {"class_path": "held_writing.HoldWriting", "init_args": {"number": HELD_STEP + 1}}
UPDATE = {
    "class_path": "holds.HoldAtStage",
    "init_args": {"stage": "micro_batch", "step": HELD_STEP},
}
KILLED = [
    ("fsdp2", hold("generation"), False, 0),
    ("fsdp2", WRITING, True, 1),
    pytest.param("deepspeed_stage_1", UPDATE, False, 1, marks=needs_deepspeed),
    pytest.param("deepspeed_stage_2", WRITING, False, 1, marks=needs_deepspeed),
    pytest.param("deepspeed_stage_3", hold("generation"), False, 1, marks=needs_deepspeed),
]


@pytest.mark.parametrize(("strategy", "held", "in_background", "killed"), KILLED)
def test_a_rank_leaves_when_one_that_it_shares_a_model_with_is_killed(
    strategy, held, in_background, killed, tmp_path, importer, wholes
):
    """The run goes on from the last complete checkpoint, also when the next one is half written."""
    saving = {
        "class_path": "Checkpoints",
        "init_args": {"every_n_steps": 1, "in_background": in_background},
    }
    settings = config(held, saving, devices=2, strategy=strategy)
    directory = begin(tmp_path / "run", settings)
    with both(importer, directory) as ranks:
        wait_until_held(ranks, directory)
        os.kill(ranks.pids[killed], signal.SIGKILL)
        (directory / "signalled").touch()
        codes = ranks.wait(60)  # the timeout of the process group is 30 minutes
    other = 1 - killed
    assert codes[killed] == -signal.SIGKILL
    assert codes[other] == ExitCode.RANK_LOST, said(directory, other)
    assert "another process of the run has ended or does not answer" in said(directory, other)
    assert saved_step(directory) == HELD_STEP
    assert why_unusable((directory / "run/checkpoints/last.ckpt").resolve(), reads_all=True) == ""
    finish(importer, directory, num_ranks=2)
    assert not list((directory / "run/checkpoints").glob("*.partial"))
    assert_same_runs(directory, wholes(strategy))


@pytest.mark.parametrize("step", [HELD_STEP, 0], ids=["weight-update", "start"])
def test_a_signal_leaves_the_wait_for_a_server(step, tmp_path, importer):
    leave_server(importer, tmp_path / "run", step, **DDP)


@pytest.mark.parametrize(
    "strategy", ["fsdp2", pytest.param("deepspeed_stage_3", marks=needs_deepspeed)]
)
@pytest.mark.parametrize("leave", [leave_outage, leave_server, leave_stalled])
def test_ranks_that_share_a_model_leave_what_one_of_them_waits_for(
    leave, strategy, tmp_path, importer
):
    leave(importer, tmp_path / "run", devices=2, strategy=strategy)


LIMITS = {
    "max_time": lambda: ("--trainer.max_time", "00:00:00:10"),
    "leave_by": lambda: ("--leave_by", f"{datetime.now() + timedelta(seconds=75):%FT%T}"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_ranks_leave_in_time_although_one_is_held(limit, tmp_path, importer, whole):
    directory = begin(tmp_path / "run", config(reward=ON_ONE_RANK, **DDP))
    with both(importer, directory, *LIMITS[limit]()) as ranks:
        assert ranks.wait() == [ExitCode.TIME_IS_UP, 0], said(directory, 0) + said(directory, 1)
    assert limit in said(directory, 0)
    finish(importer, directory, num_ranks=2)
    assert_same_runs(directory, whole)


def test_a_watchdog_ends_both_ranks_although_one_scores_for_ever(tmp_path, importer, whole):
    directory = leave_stalled(importer, tmp_path / "run", **DDP)
    finish(importer, directory, num_ranks=2)
    assert_same_runs(directory, whole)


def test_ctrl_c_reaches_both_ranks_of_a_terminal_and_ends_them_once(tmp_path, importer, whole):
    directory = begin(tmp_path / "run", PLACES["generation"])
    with importer.running(["2", *words()], directory, program="forked_program") as started:
        (process,) = started.processes
        held = [(directory / f"held{rank}").exists for rank in (0, 1)]
        wait_until(lambda: process.poll() is not None or all(one() for one in held), 240)
        os.killpg(process.pid, signal.SIGINT)
        (directory / "signalled").touch()
        assert process.wait(240) == 128 + signal.SIGINT, said(directory)
    assert f"Ended by SIGINT after {HELD_STEP} rollout steps." in said(directory)
    finish(importer, directory, num_ranks=2)
    assert_same_runs(directory, whole)
