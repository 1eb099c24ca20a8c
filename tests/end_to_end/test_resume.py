"""Real runs that are killed or asked to end continue bit-identically when they are resumed."""

import os
import re
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from _checks import step_metrics
from engine_runs import num_steps, run_to_its_end
from forked_ranks import Importer
from killed_run import TIMELESS
from paths import SUPPORT
from processes import LIT_GRPO
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
    - class_path: Checkpoints
      init_args: {{every_n_steps: 2}}
    - class_path: holds.HoldRun  # so that a signal never comes too late
      init_args: {{step: {held_step}}}
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
WORDS = ["fit", "--config", "../run.yaml", "--run_dir", "run"]


def end_after(importer: Importer, directory: Path, num_rows: int, signum: int, *more: str) -> int:
    """Start a run and send a signal once it has logged so many steps; return its exit code."""
    with importer.running([*WORDS, *more], directory) as process:
        wait_until(lambda: not process.are_running() or num_steps(directory) >= num_rows, 240)
        assert process.are_running(), said(directory)
        os.killpg(process.pids[0], signum)
        (directory / "go").touch()
        (exit_code,) = process.wait()
    (directory / "go").unlink()
    return exit_code


def said(directory: Path) -> str:
    return (directory / "said.txt").read_text()


def final_weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "run" / "final" / "model.safetensors")


def assert_asked_to_end(exit_code: int, directory: Path, updates: int) -> None:
    """Check that the run has said why it ended and has saved its last step."""
    assert exit_code == 128 + signal.SIGTERM
    assert "SIGTERM" in said(directory)
    last = said(directory).strip().splitlines()[-1]
    assert re.search(r"Resume after \d+ steps? with: lit-grpo fit run$", last)
    path = directory / "run" / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    assert checkpoint["global_step"] == num_steps(directory) * updates


@pytest.mark.parametrize(
    ("epochs", "minibatches", "signals"),
    [
        (1, 1, [(5, signal.SIGKILL)]),
        (2, 2, [(3, signal.SIGKILL), (6, signal.SIGTERM), (9, signal.SIGKILL)]),
    ],
    ids=["one-update", "four-updates-per-rollout-step"],
)
def test_a_run_that_is_killed_or_asked_to_end_resumes_bit_identically(
    tmp_path, importer, epochs, minibatches, signals
):
    """An undisturbed run with one update is a new interpreter, the others are forked."""
    updates = epochs * minibatches
    (tmp_path / "run.yaml").write_text(
        CONFIG.format(
            max_steps=NUM_ROLLOUTS * updates,
            epochs=epochs,
            minibatches=minibatches,
            held_step=NUM_ROLLOUTS - 2,
        )
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for directory in (whole, broken):
        directory.mkdir()
    (whole / "go").touch()
    if updates == 1:
        run_to_its_end([*LIT_GRPO, *WORDS], whole, PYTHONPATH=str(SUPPORT))
    else:
        importer.run(WORDS, whole)
    resume: tuple[str, ...] = ()
    for num_rows, signum in signals:
        exit_code = end_after(importer, broken, num_rows, signum, *resume)
        if signum == signal.SIGTERM:
            assert_asked_to_end(exit_code, broken, updates)
        assert (broken / "run" / "checkpoints" / "last.ckpt").exists()
        assert not (broken / "run" / "final").exists()
        resume = ("--ckpt_path", "last")
    (broken / "go").touch()
    importer.run([*WORDS, *resume], broken)

    torch.testing.assert_close(final_weights(broken), final_weights(whole), rtol=0, atol=0)
    # The metrics are the same as well, with one row per step.
    tables = [step_metrics(run / "run") for run in (whole, broken)]
    names = ["step", *(name for name in tables[0] if name.startswith(TIMELESS))]
    assert len(tables[0]) == NUM_ROLLOUTS
    pd.testing.assert_frame_equal(*(table[names] for table in tables))
