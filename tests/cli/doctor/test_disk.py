"""What ``lit-grpo doctor`` says that a run writes, next to what it has written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doctor_runs import doctor

from lit_grpo.__main__ import main

LARGER = (pytest.param(1, size, marks=pytest.mark.slow) for size in (2, 32))


@pytest.mark.parametrize(("num_rewards", "group_size"), [(4, 2), *LARGER])
def test_the_files_of_short_completions_are_as_large_as_was_said(num_rewards, group_size, capsys):
    rewards = [
        {"class_path": "MathReward", "init_args": {"name": f"reward_{number}"}}
        for number in range(num_rewards)
    ]
    words = [f"--model.rewards={json.dumps(rewards)}", f"--model.group_size={group_size}"]
    words += ["--run_dir=run", "--trainer.max_steps=2"]
    _, shown = doctor(capsys, *words)
    said = float(re.search(r"completions \(at most\) ([\d.]+) KiB", shown["disk"])[1])
    assert main(["fit", "--config=base.yaml", *words]) == 0
    files = [*Path("run/completions").iterdir()]
    assert len(files) == 2
    written = sum(path.stat().st_size for path in files) / 1024
    assert 0.6 * said < written < said
