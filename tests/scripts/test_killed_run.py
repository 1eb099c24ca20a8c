"""The command that kills a run at random moments, with few of them, and what it would notice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import killed_run as script
import pandas as pd
import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_at_random_moments_ends_as_the_undisturbed_one(
    tmp_path, importer, monkeypatch
):
    """The undisturbed run is a new interpreter, those that are killed are forked."""
    start = script.start

    def start_run(directory: Path) -> Any:
        if directory.name == "whole":
            return start(directory)
        command, variables = script.command_in(directory)
        said = directory / "said.txt"
        return importer.start(command[3:], directory, said, is_new=False, **variables)

    monkeypatch.setattr(script, "start", start_run)
    words = ["--kills", "2", "--seed", "3", "--signal", "KILL", "TERM", "--dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["killed_run.py", *words])
    assert script.main() == 0
    assert len(pd.read_csv(tmp_path / "killed/run/metrics.csv")) == 43  # one before training
    said = (tmp_path / "killed/said.txt").read_text()
    num_left, num_starts = said.count("Ended by SIGTERM"), said.count("run directory: ")
    assert 0 < num_left < num_starts - 1  # the last one has ended by itself


@pytest.fixture
def runs(tmp_path) -> tuple[Path, Path]:
    """What two equal runs leave behind."""
    for name in ("whole", "killed"):
        run = tmp_path / name / "run"
        (run / "completions").mkdir(parents=True)
        (run / "final").mkdir()
        (run / "final/model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "said.txt").write_text("run directory: run\n" * 2 + "resuming from x\n")
        metrics = {"step": [0, 1], "reward/mean": [0.1, 0.2], "seconds": [1, 2]}
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


def kill(stage: str, exit_code: int = -9, signum: int = 9) -> script.Kill:
    return script.Kill(signum=signum, stage=stage, exit_code=exit_code, seconds=0.5)


KILLS = [*map(kill, script.STAGES)]


def checks(runs, kills=KILLS) -> dict[str, tuple[bool, str]]:
    return script.compare(*runs, kills, 2)


def failed(runs, *kills) -> list[str]:
    return [one for one, (holds, _) in checks(runs, *kills).items() if not holds]


def test_equal_runs_pass(runs):
    assert failed(runs) == []


def test_a_start_counts_as_resumed_if_it_has_gone_on_from_a_checkpoint(runs):
    assert checks(runs)["it was resumed"][1] == "1 of its 2 starts went on from a checkpoint"
    (runs[1] / "said.txt").write_text("run directory: run\n" * 2)
    assert failed(runs) == ["it was resumed"]


def test_a_stage_without_a_kill_is_noticed(runs):
    others = [one for one in KILLS if one.stage != "reward"]
    assert failed(runs, others) == ["it was killed in every stage"]


@pytest.mark.parametrize("exit_code", [1, -15])
def test_an_exit_code_that_hides_the_signal_is_noticed(exit_code, runs):
    assert failed(runs, [*KILLS, kill("reward", 143, 15)]) == []
    hiding = [*KILLS, kill("reward", exit_code, 15)]
    assert failed(runs, hiding) == ["it ended with the exit code of the signal"]


@pytest.mark.parametrize(
    ("name", "content", "noticed"),
    [
        ("final/model.safetensors", b"other", "final model"),
        ("metrics.csv", b"step,reward/mean,seconds\n0,0.1,1\n", "metrics"),
        ("metrics.csv", b"step,reward/mean,seconds\n0,0.1,1\n1,0.3,2\n", "metrics"),
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
