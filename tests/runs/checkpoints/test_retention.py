"""Which checkpoints remain after each save, on files as the writer leaves them."""

from __future__ import annotations

import os

import pytest
import torch

from lit_grpo.runs.checkpoints.files import last_checkpoint
from lit_grpo.runs.checkpoints.retention import KeptCheckpoints
from lit_grpo.runs.checkpoints.writer import CheckpointWriter


def write(directory, step: int, *, name: str = "", trouble: str = ""):
    path = directory / (name or f"step_{step:06d}.ckpt")
    time = f"2026-11-25T10:00:{step:02d}.000+00:00"
    summary = {
        "rollout_step": step,
        "optimizer_step": step,
        "time": time,
        "trouble": trouble,
        "metrics": {},
    }
    CheckpointWriter().save_checkpoint(
        {"state_dict": {"weight": torch.ones(1)}, "summary": summary}, path
    )
    return path


def names(directory):
    return sorted(path.name for path in directory.glob("*.ckpt"))


@pytest.fixture
def directory(tmp_path):
    """Return the directory of checkpoints of a run."""
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def test_the_newest_remain_and_the_newest_healthy_one(directory):
    kept = KeptCheckpoints(directory, 2)
    for step in range(1, 6):
        kept.add(write(directory, step, trouble="no reward" if step > 2 else ""))
    healthy, *newest = names(directory)[1:]
    assert healthy == "step_000002.ckpt"
    assert newest == ["step_000004.ckpt", "step_000005.ckpt"]
    assert os.readlink(directory / "last.ckpt") == "step_000005.ckpt"


def test_a_run_that_resumes_from_an_earlier_one_counts_it_as_the_last_at_once(directory, caplog):
    for step in (2, 4, 6):
        path = write(directory, step)
    write(directory, 6, name="best.ckpt")
    kept = KeptCheckpoints(directory, 9)
    kept.add(path)
    kept.resume_from(directory / "step_000002.ckpt", 2, kept.read_manifests())
    assert "had got to rollout step 6, and goes on after step 2" in caplog.text
    assert {one.name for one in kept.left_behind} == {
        "step_000004.ckpt",
        "step_000006.ckpt",
        "best.ckpt",
    }
    assert os.readlink(directory / "last.ckpt") == "step_000002.ckpt"
    assert last_checkpoint(directory.parent).resolve().name == "step_000002.ckpt"

    kept.add(write(directory, 3))
    assert names(directory) == ["last.ckpt", "step_000002.ckpt", "step_000003.ckpt"]
    assert kept.left_behind == []


def test_a_step_that_is_repeated_replaces_its_checkpoint(directory):
    for step in (2, 4):
        write(directory, step)
    kept = KeptCheckpoints(directory, 9)
    kept.resume_from(directory / "step_000002.ckpt", 2, kept.read_manifests())
    kept.add(write(directory, 4))
    assert names(directory) == ["last.ckpt", "step_000002.ckpt", "step_000004.ckpt"]


def test_a_run_that_resumes_from_its_last_leaves_nothing_behind(directory, caplog):
    kept = KeptCheckpoints(directory, 9)
    kept.add(write(directory, 2))
    kept.resume_from(directory / "last.ckpt", 2, kept.read_manifests())
    assert kept.left_behind == []
    assert caplog.text == ""
