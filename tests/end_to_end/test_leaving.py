"""Real runs that leave a step or a validation, and repeat it bit-identically when resumed."""

import json
import os
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from engine_runs import command, run_to_its_end, running
from killed_run import TIMELESS
from paths import SUPPORT
from safetensors.torch import load_file
from served_engines import PROGRAM, QUICK
from sglang_server import OFFLINE
from worker_processes import wait_until

from lit_grpo.stopping import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 5
HELD_STEP = 2
WITH_SUPPORT = {"PYTHONPATH": str(SUPPORT)}


def config(*callbacks: dict, reward: dict | None = None, **trainer) -> dict:
    """Return a config of a tiny model that is validated at every second step."""
    return {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": NUM_STEPS,
            "check_val_every_n_epoch": None,
            "val_check_interval": 2,
            "enable_progress_bar": False,
            "callbacks": list(callbacks),
            **trainer,
        },
        "model": {
            "policy": {
                "architecture": {
                    "model_type": "llama",
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "initializer_range": 0.1,
                }
            },
            "group_size": 4,
            "sampling": {"max_tokens": 6, "min_tokens": 6},
            "rewards": [reward or {"class_path": "small_runs.ShareOfLowBytes"}],
            "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.003}},
            "evaluation": {"before_training": False},
        },
        "data": {
            "class_path": "AdditionData",
            "init_args": {
                "num_digits": 1,
                "validation_size": 8,
                "validation_batch_size": 4,
                "train_size": 40,
                "prompts_per_step": 4,
            },
        },
    }


def hold(stage: str, step: int = HELD_STEP) -> dict:
    return {"class_path": "holds.HoldStage", "init_args": {"stage": stage, "step": step}}


PLACES = {
    "generation": config(hold("generation")),
    # The validation after two steps; one batch of it is done when the second is held.
    "evaluation": config(hold("evaluation")),
    "reward": config(
        reward={
            "class_path": "holds.HeldReward",
            "init_args": {"call": HELD_STEP * 16 + 5, "name": "share_of_low_bytes"},
        }
    ),
}


def words(*more: str) -> list[str]:
    return [*command("fit", "run.json", {}), *more]


def begin(directory: Path, settings: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(json.dumps(settings))
    return directory


def said(directory: Path) -> str:
    return (directory / "said.txt").read_text()


def wait_until_held(process, directory: Path, rank: int = 0) -> None:
    is_held = (directory / f"held{rank}").exists
    wait_until(lambda: process.poll() is not None or is_held(), 240)
    assert process.poll() is None, said(directory)


def leave(
    directory: Path,
    *more: str,
    signum: int = signal.SIGTERM,
    num_ranks: int = 1,
    **variables: str,
) -> int:
    """Send a signal to the first process once all are held; return its exit code."""
    with running(words(*more), directory, **WITH_SUPPORT, **variables) as process:
        for rank in range(num_ranks):
            wait_until_held(process, directory, rank)
        os.kill(process.pid, signum)
        (directory / "signalled").touch()
        exit_code = process.wait(240)
    (directory / "go").touch()
    return exit_code


def metrics(directory: Path) -> pd.DataFrame:
    table = pd.read_csv(directory / "run" / "metrics.csv")
    return table[["step", *(name for name in table if name.startswith(TIMELESS))]]


def saved_step(directory: Path) -> int:
    path = directory / "run" / "checkpoints" / "last.ckpt"
    return torch.load(path, weights_only=False)["global_step"]


def assert_same_runs(one: Path, other: Path) -> None:
    weights = [load_file(run / "run" / "final" / "model.safetensors") for run in (one, other)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    tables = [metrics(run) for run in (one, other)]
    pd.testing.assert_frame_equal(*(table[sorted(table)] for table in tables))


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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_signal_to_one_rank_leaves_the_generation_of_all(tmp_path, strategy):
    settings = config(hold("generation"), devices=2, strategy=strategy)
    directory = begin(tmp_path / "run", settings)
    assert leave(directory, num_ranks=2) == 128 + signal.SIGTERM, said(directory)
    assert f"Ended by SIGTERM after {HELD_STEP} rollout steps." in said(directory)
    run_to_its_end(words("--ckpt_path", "auto"), directory, **WITH_SUPPORT)
    whole = begin(tmp_path / "whole", settings)
    (whole / "go").touch()
    run_to_its_end(words(), whole, **WITH_SUPPORT)
    assert_same_runs(directory, whole)


def with_server(step: int, program: list[str]) -> dict:
    """Return a config with a server that is silent from the weight update of a step on."""
    settings = config({"class_path": "holds.SilenceServers", "init_args": {"step": step}})
    settings["model"]["engine"] = {
        "class_path": "SGLangEngine",
        "init_args": {
            "launch": {"program": program, "env": OFFLINE},
            "supervision": QUICK | {"health_timeout": 600, "weight_sync_timeout": 600},
        },
    }
    return settings


@pytest.mark.parametrize(
    ("step", "program"),
    [(HELD_STEP, PROGRAM), (0, ["/bin/sh", "-c", "sleep 1000"])],
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
