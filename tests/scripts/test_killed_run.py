"""The command that kills a run at random moments, with few of them, and what it would notice."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import killed_run as script
import pandas as pd
import pytest
from paths import ROOT
from processes import run_program

COMMAND = [sys.executable, str(ROOT / "scripts" / "killed_run.py")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_at_random_moments_ends_as_the_undisturbed_one(tmp_path):
    run_program([*COMMAND, "--kills", "2", "--seed", "3", "--dir", str(tmp_path)], tmp_path)
    assert len(pd.read_csv(tmp_path / "killed/run/metrics.csv")) == 42


@pytest.fixture
def runs(tmp_path) -> tuple[Path, Path]:
    """What two equal runs leave behind."""
    for name in ("whole", "killed"):
        run = tmp_path / name / "run"
        (run / "completions").mkdir(parents=True)
        (run / "final").mkdir()
        (run / "final/model.safetensors").write_bytes(b"weights")
        metrics = {"step": [0, 1], "resumes": [0, 1], "reward/mean": [0.1, 0.2], "seconds": [1, 2]}
        pd.DataFrame(metrics).to_csv(run / "metrics.csv", index=False)
        rows = {
            "step": [0],
            "prompt_id": ["a"],
            "token_ids": [[1]],
            "reward": [1],
            "advantage": [0],
        }
        pd.DataFrame(rows).to_parquet(run / "completions/step_000000.parquet")
    return tmp_path / "whole", tmp_path / "killed"


def failed(runs, **kills: int) -> list[str]:
    every = dict.fromkeys(script.STAGES, 1)
    checks = script.compare(*runs, Counter(every | kills), 2)
    return [statement for statement, (holds, _) in checks.items() if not holds]


def test_equal_runs_pass(runs):
    assert failed(runs) == []


def test_a_stage_without_a_kill_is_noticed(runs):
    assert failed(runs, reward=0) == ["it was killed in every stage"]


@pytest.mark.parametrize(
    ("name", "content", "noticed"),
    [
        ("final/model.safetensors", b"other", "final model"),
        ("metrics.csv", b"step,resumes,reward/mean,seconds\n0,1,0.1,1\n", "metrics"),
        ("metrics.csv", b"step,resumes,reward/mean,seconds\n0,0,0.1,1\n1,1,0.3,2\n", "metrics"),
        ("metrics.csv", b"step,resumes,reward/mean,seconds\n0,0,0.1,1\n1,0,0.2,2\n", "resumed"),
    ],
)
def test_a_difference_is_noticed(runs, name, content, noticed):
    (runs[1] / "run" / name).write_bytes(content)
    (statement,) = failed(runs)
    assert noticed in statement


def test_a_completion_that_differs_is_noticed(runs):
    path = runs[1] / "run/completions/step_000000.parquet"
    pd.read_parquet(path).assign(token_ids=[[2]]).to_parquet(path)
    assert failed(runs) == ["its completions are the same"]
