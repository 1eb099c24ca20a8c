"""What a new user does first, from outside: the real command, in an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM

# A namespace without a network interface, where the system allows one to be made.
OFFLINE = ["unshare", "--map-root-user", "--net"]


def lit_grpo(*arguments: str, cwd: Path, offline: bool = False) -> subprocess.CompletedProcess[str]:
    prefix = OFFLINE if offline and subprocess.run([*OFFLINE, "true"]).returncode == 0 else []
    return subprocess.run(
        [*prefix, sys.executable, "-m", "lit_grpo", *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        start_new_session=True,
    )


@pytest.mark.slow
def test_the_debug_config_runs_every_part_without_a_network(tmp_path):
    result = lit_grpo("fit", "--config", "debug", cwd=tmp_path, offline=True)
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
