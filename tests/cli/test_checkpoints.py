"""The command that lists, verifies and goes back to checkpoints, on files as a run writes them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch
import yaml
from cli_base import BASE

from lit_grpo.__main__ import main
from lit_grpo.runs.checkpoints.files import link_last
from lit_grpo.runs.checkpoints.resume import find_checkpoint
from lit_grpo.runs.checkpoints.writer import CheckpointWriter


def write(directory, step, *, trouble="", reward=0.5, weight=1.0):
    summary = {
        "rollout_step": step,
        "optimizer_step": 2 * step,
        "time": f"2026-11-23T10:{step:02}:00+00:00",
        "trouble": trouble,
        "metrics": {"reward/mean": reward},
    }
    path = directory / "checkpoints" / f"step_{step:06d}.ckpt"
    state = {"state_dict": {"w": torch.full((1000,), weight)}, "summary": summary}
    CheckpointWriter().save_checkpoint(state, path)
    os.utime(path, (step, step))
    link_last(path)
    return path


@pytest.fixture
def run(tmp_path):
    """A run with three checkpoints, the last one in trouble."""
    write(tmp_path, 10)
    write(tmp_path, 20, reward=0.75)
    write(tmp_path, 30, reward=0.0, trouble="no reward for 7 rollout steps in a row")
    return tmp_path


def shown(capsys, *arguments):
    code = main(["checkpoints", *map(str, arguments)])
    return code, capsys.readouterr()


def test_the_table_has_a_row_for_each_with_its_state(run, capsys):
    code, said = shown(capsys, run)
    header, *rows = [line.split() for line in said.out.splitlines()]
    assert code == 0
    assert header == ["checkpoint", "step", "written", "size", "reward", "state"]
    assert [row[:2] for row in rows] == [
        ["step_000030.ckpt", "30"],
        ["step_000020.ckpt", "20"],
        ["step_000010.ckpt", "10"],
    ]
    assert rows[0][2:4] == ["2026-11-23", "10:30:00"]
    assert rows[1][6] == "0.750"
    assert "complete, but no reward for 7 rollout steps in a row" in said.out
    assert said.out.count("complete, healthy") == 2


def test_verify_reads_all_and_the_exit_code_says_whether_one_is_damaged(run, capsys):
    code, said = shown(capsys, run, "--verify")
    assert (code, said.out.count("verified")) == (0, 3)
    path = run / "checkpoints" / "step_000020.ckpt"
    content = bytearray(path.read_bytes())
    content[content.find(torch.ones(4).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert shown(capsys, run)[0] == 0
    code, said = shown(capsys, run, "--verify")
    assert code == 1
    (row,) = [line for line in said.out.splitlines() if "step_000020" in line]
    assert row.rstrip().endswith("its content is not what was written")


@pytest.mark.parametrize("option", ["--latest", "--recover"])
def test_what_was_damaged_within_is_no_intact_one(run, option, capsys):
    path = run / "checkpoints" / "step_000030.ckpt"
    content = bytearray(path.read_bytes())
    content[content.find(torch.ones(4).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert f"{run}/checkpoints/step_000020.ckpt" in shown(capsys, run, option)[1].out


def test_the_latest_is_the_newest_that_is_intact(run, capsys):
    assert shown(capsys, run, "--latest")[1].out == f"{run}/checkpoints/step_000030.ckpt\n"
    (run / "checkpoints/step_000030.ckpt").write_bytes(b"torn")
    assert shown(capsys, run, "--latest")[1].out == f"{run}/checkpoints/step_000020.ckpt\n"
    assert shown(capsys, run, "--latest", "--before_step", 20)[1].out.endswith("step_000010.ckpt\n")
    assert shown(capsys, run)[0] == 1


def test_recover_makes_an_earlier_one_the_one_to_go_on_from(run, capsys):
    wanted = run / "checkpoints/step_000020.ckpt"
    code, said = shown(capsys, run, "--before_step", 30, "--recover", "--dry_run")
    assert f"would go on from {wanted} after rollout step 20" in said.out
    assert os.readlink(run / "checkpoints/last.ckpt") == "step_000030.ckpt"
    code, said = shown(capsys, run, "--before_step", 30, "--recover")
    assert code == 0
    assert f"{run} goes on from {wanted} after rollout step 20" in said.out
    assert os.path.realpath(find_checkpoint("last", run)) == str(wanted)
    assert (run / "checkpoints/step_000030.ckpt").exists()


def test_recover_in_a_directory_that_cannot_be_written_is_one_line(run, monkeypatch, capsys):
    def refuse(checkpoint):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(checkpoint))

    monkeypatch.setattr("lit_grpo.cli.checkpoints.choose", refuse)
    code, said = shown(capsys, run, "--recover")
    assert code == 2
    assert f"{run} must be a directory that can be written (Read-only file system)" in said.err


def test_recover_prefers_the_newest_healthy_one_and_says_what_it_passes_over(run, capsys):
    wanted = run / "checkpoints/step_000020.ckpt"
    code, said = shown(capsys, run, "--recover")
    assert code == 0
    assert said.out.splitlines() == [
        f"{run} goes on from {wanted} after rollout step 20 when it is resumed",
        "step_000030.ckpt is newer, but not known to be healthy (no reward for 7 rollout steps in "
        "a row)",
    ]
    assert os.path.realpath(find_checkpoint("last", run)) == str(wanted)
    wanted.write_bytes(b"torn")
    assert "step_000010.ckpt after rollout step 10" in shown(capsys, run, "--recover")[1].out


def test_recover_takes_the_newest_intact_one_of_a_run_without_a_healthy_one(tmp_path, capsys):
    for step in (10, 20):
        write(tmp_path, step, trouble=f"no reward for {step} rollout steps in a row")
    code, said = shown(capsys, tmp_path, "--recover")
    assert code == 0
    chosen, why = said.out.splitlines()
    assert "step_000020.ckpt after rollout step 20" in chosen
    assert why == (
        "no intact checkpoint is known to be healthy: this is the newest (no reward for 20 rollout "
        "steps in a row)"
    )


@pytest.mark.slow
def test_a_real_run_goes_on_from_the_recovered_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saving = {"class_path": "Checkpoints", "init_args": {"every_n_steps": 1, "keep_last": 9}}
    config = BASE | {"trainer": BASE["trainer"] | {"max_steps": 3, "callbacks": [saving]}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config=base.yaml", "--run_dir=run"]) == 0
    assert shown(capsys, "run", "--before_step", 2, "--recover")[0] == 0
    assert main(["fit", "run"]) == 0
    log = (tmp_path / "run/run.log").read_text()
    assert "resuming from run/checkpoints/last.ckpt after rollout step 1" in log
    assert "this run had got to rollout step 3, and goes on after step 1" in log
    assert "is replaced (step_000003.ckpt, step_000002.ckpt, rows of metrics.csv" in log


@pytest.mark.slow
def test_a_run_that_is_training_is_not_recovered(run, capsys):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(1) == b"1"
        code, said = shown(capsys, run, "--before_step", 30, "--recover")
        process.communicate(b"")
    assert code == 2
    assert "must have ended before --recover, but a process trains in it" in said.err
    assert os.readlink(run / "checkpoints/last.ckpt") == "step_000030.ckpt"


def test_files_of_a_killed_save_are_named_also_if_another_run_is_inside(tmp_path, capsys):
    write(tmp_path / "inner", 10)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step_000001.ckpt.earlier").write_bytes(b"x")
    code, said = shown(capsys, str(tmp_path))
    assert code == 2
    assert "step_000001.ckpt is missing" in said.err
    assert f"Did you mean {tmp_path}/inner?" in said.err


HOLD_THE_LOCK = """
import sys
from pathlib import Path
from lit_grpo.runs.files.lock import locked

with locked(Path(sys.argv[1])):
    print(1, end="", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "checkpoints needs RUN: the run with the checkpoints. For example: lit"),
        (["nowhere"], "nowhere: no such run."),
        (["."], ". has no checkpoint. Did you mean run?"),
        (["run/checkpoints"], "run/checkpoints has no checkpoint.\n"),
        (["run", "--before_step", "10"], "run has no checkpoint from before step 10."),
        (["run", "--before_step", "x"], "--before_step: invalid int value: 'x'. See lit-grpo"),
        (["run", "--bfore"], "unrecognized arguments: --bfore. See lit-grpo checkpoints --help."),
    ],
)
def test_mistakes_are_one_line(arguments, line, tmp_path, monkeypatch, capsys):
    write(tmp_path / "run", 10)
    monkeypatch.chdir(tmp_path)
    code, said = shown(capsys, *arguments)
    assert code == 2
    assert said.err.startswith("error: ")
    assert line in said.err
    assert said.err.count("\n") == 1


def test_one_without_a_manifest_is_listed_too(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    torch.save({}, tmp_path / "checkpoints/epoch=0-step=3.ckpt")
    code, said = shown(capsys, tmp_path)
    assert code == 0
    assert "no manifest: looks complete" in said.out
