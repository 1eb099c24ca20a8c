"""Real runs that leave a step or a validation, and repeat it bit-identically when resumed."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from engine_runs import run_to_its_end, running
from left_runs import (
    HELD_STEP,
    NEVER_READY,
    WITH_SUPPORT,
    assert_same_runs,
    begin,
    config,
    held_reward,
    hold,
    said,
    saved_step,
    with_server,
    words,
)
from safetensors.torch import load_file
from served_engines import PROGRAM
from worker_processes import wait_until

from lit_grpo.stopping import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLACES = {
    "generation": config(hold("generation")),
    # The validation after two steps; one batch of it is done when the second is held.
    "evaluation": config(hold("evaluation")),
    "reward": config(reward=held_reward()),
}


def leave(directory: Path, *more: str, signum: int = signal.SIGTERM, **variables: str) -> int:
    """Send a signal to the process once it is held; return its exit code."""
    is_held = (directory / "held0").exists
    with running(words(*more), directory, **WITH_SUPPORT, **variables) as process:
        wait_until(lambda: process.poll() is not None or is_held(), 240)
        assert process.poll() is None, said(directory)
        os.kill(process.pid, signum)
        (directory / "signalled").touch()
        exit_code = process.wait(240)
    (directory / "go").touch()
    return exit_code


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    directory = begin(tmp_path_factory.mktemp("undisturbed"), config())
    run_to_its_end(words(), directory, **WITH_SUPPORT)
    return directory


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_leaves_what_is_sampled_or_scored_and_a_resumed_run_repeats_it(
    place, tmp_path, undisturbed
):
    directory = begin(tmp_path / "run", PLACES[place])
    assert leave(directory) == 128 + signal.SIGTERM, said(directory)
    assert f"Ended by SIGTERM after {HELD_STEP} rollout steps." in said(directory)
    assert saved_step(directory) == HELD_STEP
    assert not (directory / "run" / "final").exists()
    run_to_its_end(words("--ckpt_path", "auto"), directory, **WITH_SUPPORT)
    assert_same_runs(directory, undisturbed)


@pytest.mark.parametrize(
    ("step", "program"),
    [(HELD_STEP, PROGRAM), (0, NEVER_READY)],
    ids=["weight-update", "start"],
)
def test_a_signal_leaves_the_wait_for_a_server_that_does_not_answer(step, program, tmp_path):
    directory = begin(tmp_path / "run", with_server(step, program))
    assert leave(directory) == 128 + signal.SIGTERM, said(directory)
    assert f"Ended by SIGTERM after {step} rollout steps." in said(directory)
    assert saved_step(directory) == step


def test_an_evaluation_before_the_training_is_left_and_the_run_starts_again(tmp_path, undisturbed):
    settings = config(hold("evaluation", 0))
    settings["model"]["evaluation"]["before_training"] = True
    directory = begin(tmp_path / "run", settings)
    assert leave(directory) == 128 + signal.SIGTERM, said(directory)
    assert "Ended by SIGTERM after 0 rollout steps." in said(directory)
    assert not (directory / "run" / "checkpoints").exists()
    run_to_its_end(words("--ckpt_path", "auto"), directory, **WITH_SUPPORT)
    final = [load_file(run / "run/final/model.safetensors") for run in (directory, undisturbed)]
    torch.testing.assert_close(*final, rtol=0, atol=0)


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_ARRAY_JOB_ID": "70",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def in_job(directory: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a job, in which `scontrol` writes down how it was called."""
    program = directory / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {directory}/scontrol.txt\n')
    program.chmod(0o755)
    return SLURM | {"PATH": f"{program.parent}:{os.environ['PATH']}"} | variables


def test_a_job_that_is_asked_to_leave_is_queued_again_and_goes_on(tmp_path, undisturbed):
    directory = begin(tmp_path / "run", PLACES["generation"])
    job = in_job(directory)
    resuming = ("--ckpt_path", "auto", "--requeue")
    assert leave(directory, *resuming, signum=signal.SIGUSR1, **job) == 128 + signal.SIGUSR1
    assert (directory / "scontrol.txt").read_text() == "requeue 70_3\n"
    assert "Queueing job 70_3 again." in said(directory)
    assert not list(directory.rglob("hpc_ckpt*"))
    run_to_its_end(words(*resuming), directory, **WITH_SUPPORT, **job)
    assert (directory / "scontrol.txt").read_text() == "requeue 70_3\n"
    assert_same_runs(directory, undisturbed)


def test_a_run_leaves_before_its_job_ends(tmp_path, undisturbed):
    directory = begin(tmp_path / "run", PLACES["reward"])
    job = in_job(directory, SLURM_JOB_END_TIME=str(int(time.time()) + 75))
    with running(words("--ckpt_path", "auto"), directory, **WITH_SUPPORT, **job) as process:
        assert process.wait(240) == ExitCode.TIME_IS_UP, said(directory)
    assert "the SLURM job ends at" in said(directory)
    assert not (directory / "scontrol.txt").exists()
    (directory / "go").touch()
    run_to_its_end(words("--ckpt_path", "auto"), directory, **WITH_SUPPORT)
    assert_same_runs(directory, undisturbed)
