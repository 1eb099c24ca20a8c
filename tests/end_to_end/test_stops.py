"""Real runs that leave a step or a validation, and repeat it bit-identically when resumed."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from _checks import step_metrics
from forked_ranks import Importer
from safetensors.torch import load_file
from served_engines import PROGRAM
from stopped_runs import (
    HELD_STEP,
    NEVER_READY,
    NUM_STEPS,
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

from lit_grpo.stopping import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLACES = {
    "generation": config(hold("generation")),
    # The validation after two steps; one batch of it is done when the second is held.
    "evaluation": config(hold("evaluation")),
    "reward": config(reward=held_reward()),
}


def leave(
    importer: Importer,
    directory: Path,
    *more: str,
    signum: int = signal.SIGTERM,
    **variables: str,
) -> int:
    """Send a signal to the process once it is held; return its exit code."""
    is_held = (directory / "held0").exists
    with importer.running(words(*more), directory, **variables) as process:
        wait_until(lambda: is_held() or not process.are_running(), 240)
        assert process.are_running(), said(directory)
        os.kill(process.pids[0], signum)
        (directory / "signalled").touch()
        (exit_code,) = process.wait()
    return exit_code


@pytest.fixture(scope="module")
def undisturbed(importer, tmp_path_factory) -> Path:
    directory = begin(tmp_path_factory.mktemp("undisturbed"), config())
    finish(importer, directory)
    return directory


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_leaves_what_is_sampled_or_scored_and_a_resumed_run_repeats_it(
    place, tmp_path, importer, undisturbed
):
    directory = begin(tmp_path / "run", PLACES[place])
    assert leave(importer, directory) == 128 + signal.SIGTERM, said(directory)
    assert f"Ended by SIGTERM after {HELD_STEP} rollout steps." in said(directory)
    assert saved_step(directory) == HELD_STEP
    assert not (directory / "run" / "final").exists()
    finish(importer, directory)
    assert_same_runs(directory, undisturbed)


@pytest.mark.parametrize(
    ("step", "program"),
    [(HELD_STEP, PROGRAM), (0, NEVER_READY)],
    ids=["weight-update", "start"],
)
def test_a_signal_leaves_the_wait_for_a_server_that_does_not_answer(
    step, program, tmp_path, importer
):
    directory = begin(tmp_path / "run", with_server(step, program))
    assert leave(importer, directory) == 128 + signal.SIGTERM, said(directory)
    assert f"Ended by SIGTERM after {step} rollout steps." in said(directory)
    assert saved_step(directory) == step


def test_a_resumed_run_goes_on_with_what_servers_had_sampled_ahead(tmp_path, importer):
    settings = with_server(step=NUM_STEPS)
    settings["model"] |= {"max_head_offpolicyness": 1, "rewards": [held_reward()]}
    directory = begin(tmp_path / "run", settings)
    assert leave(importer, directory) == 128 + signal.SIGTERM, said(directory)
    finish(importer, directory)
    assert re.search(r"step \d goes on with the \d+ of its 16 completions", said(directory))
    table = step_metrics(directory / "run")
    assert list(table.step) == list(range(NUM_STEPS))
    assert table["rollout/head_offpolicyness_max"].max() == 1
    assert not table["rollout/stale_fraction"].any()


def test_an_evaluation_before_the_training_is_left_and_the_run_starts_again(
    tmp_path, importer, undisturbed
):
    settings = config(hold("evaluation", 0))
    settings["model"]["evaluation"]["before_training"] = True
    directory = begin(tmp_path / "run", settings)
    assert leave(importer, directory) == 128 + signal.SIGTERM, said(directory)
    assert "Ended by SIGTERM after 0 rollout steps." in said(directory)
    assert not (directory / "run" / "checkpoints").exists()
    finish(importer, directory)
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


def test_a_job_that_is_asked_to_leave_is_queued_again_and_goes_on(tmp_path, importer, undisturbed):
    directory = begin(tmp_path / "run", PLACES["generation"])
    job = in_job(directory)
    resuming = ("--ckpt_path", "auto", "--requeue")
    exit_code = leave(importer, directory, *resuming, signum=signal.SIGUSR1, **job)
    assert exit_code == 128 + signal.SIGUSR1, said(directory)
    assert (directory / "scontrol.txt").read_text() == "requeue 70_3\n"
    assert "Queueing job 70_3 again." in said(directory)
    assert not list(directory.rglob("hpc_ckpt*"))
    finish(importer, directory, "--requeue", **job)
    assert (directory / "scontrol.txt").read_text() == "requeue 70_3\n"
    assert_same_runs(directory, undisturbed)


def test_a_run_leaves_before_its_job_ends(tmp_path, importer, undisturbed):
    directory = begin(tmp_path / "run", PLACES["reward"])
    job = in_job(directory, SLURM_JOB_END_TIME=str(int(time.time()) + 75))
    with importer.running(words("--ckpt_path", "auto"), directory, **job) as process:
        assert process.wait() == [ExitCode.TIME_IS_UP], said(directory)
    assert "the SLURM job ends at" in said(directory)
    assert not (directory / "scontrol.txt").exists()
    finish(importer, directory)
    assert_same_runs(directory, undisturbed)
