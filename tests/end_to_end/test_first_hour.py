"""What a new user does first, from outside: the real command, in an empty directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM

# Namespaces, where the system allows them to be made: one without a network, one with a small disk.
OFFLINE = ["unshare", "--map-root-user", "--net"]
SMALL_DISK = [
    *("unshare", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=8m tmpfs disk && "$@"; code=$?; cp -r disk/run kept; exit $code',
    "sh",
]


OFTEN = """
trainer:
  callbacks+:
    - class_path: ModelCheckpoint
      init_args:
        dirpath: ${run_dir}/checkpoints
        filename: step={step}
        auto_insert_metric_name: false
        every_n_train_steps: 2
        save_top_k: -1
        save_last: true
"""


def can_run(command: Sequence[str]) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command).returncode == 0


def lit_grpo(
    *arguments: str, cwd: Path, within: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*within, sys.executable, "-m", "lit_grpo", *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        start_new_session=True,
    )


@pytest.mark.slow
def test_the_debug_config_runs_every_part_without_a_network(tmp_path):
    within = OFFLINE if can_run([*OFFLINE, "true"]) else []
    result = lit_grpo("fit", "--config", "debug", cwd=tmp_path, within=within)
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "debug" / "0"
    metrics = pd.read_csv(run / "metrics.csv")
    assert len(metrics) == 20
    assert metrics["policy/kl"].notna().all()
    assert metrics["reward/digit/mean"].between(0, 1, inclusive="neither").any()
    assert metrics["val/accuracy"].notna().sum() >= 2
    assert len(list((run / "completions").iterdir())) == 20
    assert (run / "checkpoints" / "last.ckpt").exists()
    AutoModelForCausalLM.from_pretrained(run / "final")
    assert "Warning" not in result.stderr
    assert "make it async" not in result.stderr


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_goes_on_elsewhere(tmp_path):
    (tmp_path / "disk").mkdir()
    if not can_run(["unshare", "--map-root-user", "--mount", "true"]):
        pytest.skip("this system makes no namespaces for users")
    (tmp_path / "often.yaml").write_text(OFTEN)
    words = ["--config", "debug", "--config", "often.yaml", "--run_dir", "disk/run"]
    result = lit_grpo("fit", *words, cwd=tmp_path, within=SMALL_DISK)
    assert result.returncode == 1, result.stderr
    assert "error: the disk is full" in result.stderr.splitlines()[-1]
    assert "Resume with: lit-grpo fit disk/run" in result.stderr
    assert "Traceback" not in result.stderr
    assert "saved_models" not in result.stderr  # Lightning's advice on manual optimization
    done = len(pd.read_csv(tmp_path / "kept" / "metrics.csv"))
    (tmp_path / "kept").rename(tmp_path / "disk" / "run")
    result = lit_grpo("fit", "disk/run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert 0 < done < len(pd.read_csv(tmp_path / "disk" / "run" / "metrics.csv")) == 20
