from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from paths import SUPPORT

from lit_grpo.concurrency import call_with_timeout

RUN = """
import os, signal, sys
import psutil
import wandb
from lightning.pytorch.loggers import WandbLogger
from toy_rollouts import fit, outputs, rollouts
from lit_grpo.callbacks import ExitCheckpoint, WandbTeardown

directory, signum = sys.argv[1], int(sys.argv[2])
services = []

def step(number):
    if number == 1 and signum:
        for child in psutil.Process().children(recursive=True):
            services.append(child.pid)
            os.kill(child.pid, signum)
    return outputs(rollouts([[0.0, 1.0]]))

logger = WandbLogger(project="test", save_dir=directory, offline=True)
teardown = WandbTeardown(timeout_seconds=2)
trainer = fit(step, [teardown, ExitCheckpoint(directory)], steps=4, logger=logger)
is_open = wandb.run is not None
print("steps", trainer.global_step, "hung", teardown.hung, "open", is_open, flush=True)
if teardown.hung:
    for pid in services:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)
"""


def run(tmp_path, signum: int) -> subprocess.CompletedProcess:
    pytest.importorskip("wandb")
    environment = os.environ | {
        "PYTHONPATH": str(SUPPORT),
        "OMP_NUM_THREADS": "1",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), str(signum)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, stderr
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4
    return subprocess.CompletedProcess([], 0, stdout, stderr)


def test_a_healthy_wandb_run_is_ended_after_training(tmp_path):
    result = run(tmp_path, 0)
    assert result.stdout == "steps 4 hung False open False\n"
    assert "wandb failed" not in result.stderr
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_run_outlives_the_death_of_wandb(tmp_path):
    result = run(tmp_path, signal.SIGKILL)
    assert result.stdout.startswith("steps 4 hung False")
    assert result.stderr.count("wandb failed in log_metrics (ConnectionResetError") == 1


def test_a_wandb_that_hangs_is_left_behind_and_said_to_hang(tmp_path):
    result = run(tmp_path, signal.SIGSTOP)
    assert result.stdout.startswith("steps 4 hung True")
    assert result.stderr.count("wandb failed in finish (TimeoutError: no answer within 2 s)") == 1


def test_without_a_wandb_logger_nothing_of_wandb_is_imported():
    script = """
import sys
from toy_rollouts import fit, outputs, rollouts
from lit_grpo.callbacks import WandbTeardown
fit(lambda step: outputs(rollouts([[0.0, 1.0]])), [WandbTeardown()], steps=1)
print("wandb" in sys.modules)
"""
    environment = os.environ | {"PYTHONPATH": str(SUPPORT)}
    output = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    assert output == "False\n"


def test_a_bounded_call_returns_and_raises_what_the_call_does():
    assert call_with_timeout(lambda: 7, 60, "test") == 7
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(lambda: 1 // 0, 60, "test")


def test_a_bounded_call_that_does_not_come_back_raises():
    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within 0.01 s"):
        call_with_timeout(never.wait, 0.01, "test")
    never.set()
