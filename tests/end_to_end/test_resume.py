"""Real runs, killed in the middle of anything, go on as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

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


def start(directory: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "lit_grpo", "fit", "--config", "run.yaml", *arguments],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def kill_after(process: subprocess.Popen, metrics: Path, num_rows: int) -> None:
    """SIGKILL the run as soon as it has logged so many steps."""
    deadline = time.monotonic() + 240
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= num_rows:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "the run logs nothing"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "minibatches", "kills"),
    [(1, 1, [5]), (2, 2, [4, 9])],
    ids=["one-update", "four-updates-a-rollout"],
)
def test_a_killed_run_resumes_bit_identically(tmp_path, epochs, minibatches, kills):
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
    finish(start(tmp_path, "--run_dir", str(whole)))
    resume: tuple[str, ...] = ()
    for rows in kills:
        kill_after(start(tmp_path, "--run_dir", str(broken), *resume), broken / "metrics.csv", rows)
        assert (broken / "checkpoints" / "last.ckpt").exists()
        assert not (broken / "final").exists()
        resume = ("--ckpt_path", "last")
    finish(start(tmp_path, "--run_dir", str(broken), *resume))

    expected, resumed = final_weights(whole), final_weights(broken)
    assert expected.keys() == resumed.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, resumed[name]), name
    # What was logged is the same too, one row a step.
    timeless = [f"{part}/" for part in ("reward", "policy", "completions", "val", "advantage")]
    tables = [pd.read_csv(run / "metrics.csv") for run in (whole, broken)]
    names = [name for name in tables[0] if name.startswith(tuple(timeless))]
    assert len(tables[0]) == NUM_ROLLOUTS
    pd.testing.assert_frame_equal(tables[0][["step", *names]], tables[1][["step", *names]])


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_saves_says_why_and_resumes_bit_identically(tmp_path):
    text = CONFIG.format(max_steps=NUM_ROLLOUTS * 2, every=100, epochs=2, minibatches=1)
    (tmp_path / "run.yaml").write_text(text)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(tmp_path, "--run_dir", str(whole)))
    process = start(tmp_path, "--run_dir", str(broken))
    metrics = broken / "metrics.csv"
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= 3:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM" in output
    assert "--ckpt_path" in output
    finish(start(tmp_path, "--run_dir", str(broken), "--ckpt_path", "last"))
    for name, weight in final_weights(whole).items():
        assert torch.equal(weight, final_weights(broken)[name]), name
