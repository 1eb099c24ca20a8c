"""Real runs that are killed or asked to end continue bit-identically when they are resumed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from worker_processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """
trainer:
  accelerator: cpu
  max_steps: {max_steps}
  check_val_every_n_epoch: null
  val_check_interval: 3
  callbacks:
    - class_path: ModelCheckpoint
      init_args:
        dirpath: ${{run_dir}}/checkpoints
        every_n_train_steps: {every}
        save_last: true
    - class_path: ExitCheckpoint
      init_args: {{dirpath: "${{run_dir}}/checkpoints"}}
model:
  policy:
    architecture:
      model_type: llama
      hidden_size: 32
      intermediate_size: 64
      num_hidden_layers: 1
      num_attention_heads: 2
      num_key_value_heads: 2
      initializer_range: 0.1
  group_size: 4
  sampling: {{max_tokens: 4}}
  rewards:
    - class_path: FormatReward
      init_args: {{pattern: '[0-9 -~]*', mode: full, name: printable}}
    - class_path: LengthReward
      init_args: {{start_tokens: 1, end_tokens: 4, weight: 0.1}}
  objective: {{kl: {{coef: 0.01}}}}
  update: {{epochs: {epochs}, minibatches: {minibatches}}}
  optimizer:
    class_path: AdamW
    init_args: {{lr: 0.003}}
  lr_schedule: cosine
  warmup_steps: 2
data:
  class_path: AdditionData
  init_args: {{num_digits: 1, validation_size: 8, train_size: 40, prompts_per_step: 8}}
"""
NUM_ROLLOUTS = 12
TIMELESS = ("reward/", "policy/", "completions/", "val/", "advantage/")
"""Prefixes of the metrics that do not measure time."""


def start(directory: Path, run: Path, *arguments: str) -> subprocess.Popen:
    words = ["fit", "--config", "run.yaml", "--run_dir", str(run), *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "lit_grpo", *words],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output


def end_after(process: subprocess.Popen, run: Path, num_rows: int, signum: int) -> str:
    """Send a signal as soon as the run has logged so many steps; return its output."""
    metrics = run / "metrics.csv"

    def has_logged() -> bool:
        assert process.poll() is None, process.stdout.read()
        return metrics.exists() and len(metrics.read_text().splitlines()) > num_rows

    wait_until(has_logged, 240)
    os.killpg(process.pid, signum)
    output, _ = process.communicate(timeout=120)
    return output


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


def assert_asked_to_end(process: subprocess.Popen, output: str, run: Path, updates: int) -> None:
    """Check that the run has said why it ended and has saved its last step."""
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM" in output
    assert output.strip().endswith(f"Resume with: lit-grpo fit {run}")
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=False)
    num_steps = len(pd.read_csv(run / "metrics.csv"))
    assert checkpoint["global_step"] == num_steps * updates


@pytest.mark.parametrize(
    ("epochs", "minibatches", "signals"),
    [
        (1, 1, [(5, signal.SIGKILL)]),
        (2, 2, [(3, signal.SIGKILL), (6, signal.SIGTERM), (9, signal.SIGKILL)]),
    ],
    ids=["one-update", "four-updates-per-rollout-step"],
)
def test_a_run_that_is_killed_or_asked_to_end_resumes_bit_identically(
    tmp_path, epochs, minibatches, signals
):
    updates = epochs * minibatches
    (tmp_path / "run.yaml").write_text(
        CONFIG.format(
            max_steps=NUM_ROLLOUTS * updates,
            every=2 * updates,
            epochs=epochs,
            minibatches=minibatches,
        )
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(tmp_path, whole))
    resume: tuple[str, ...] = ()
    for num_rows, signum in signals:
        process = start(tmp_path, broken, *resume)
        output = end_after(process, broken, num_rows, signum)
        if signum == signal.SIGTERM:
            assert_asked_to_end(process, output, broken, updates)
        assert (broken / "checkpoints" / "last.ckpt").exists()
        assert not (broken / "final").exists()
        resume = ("--ckpt_path", "last")
    finish(start(tmp_path, broken, *resume))

    torch.testing.assert_close(final_weights(broken), final_weights(whole), rtol=0, atol=0)
    # The metrics are the same as well, with one row per step.
    tables = [pd.read_csv(run / "metrics.csv") for run in (whole, broken)]
    names = ["step", *(name for name in tables[0] if name.startswith(TIMELESS))]
    assert len(tables[0]) == NUM_ROLLOUTS
    pd.testing.assert_frame_equal(*(table[names] for table in tables))
