from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from empty_checkpoints import write_empty
from forked import run_in_processes

from lit_grpo.runs.checkpoints.resume_checks import (
    check_checkpoint_fits,
    check_run_dir_is_new,
    check_same_checkpoint_on_ranks,
    enclosing_run,
)
from lit_grpo.types import UserError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_checkpoint_of_another_kind_of_training_is_refused(here):
    grpo, sft, other = (str(here / "run/checkpoints" / name) for name in ("a.ckpt", "b.ckpt", "c"))
    write_empty(Path(grpo))
    torch.save({"loops": {}, "rollout_step": 3}, grpo)
    torch.save({"loops": {}}, sft)
    torch.save({"state_dict": {}}, other)
    for path in (grpo, other, str(here / "nowhere")):
        check_checkpoint_fits(path, is_grpo=True)
    check_checkpoint_fits(sft, is_grpo=False)
    with pytest.raises(ValueError, match=r"written by lit-grpo sft.*policy.path to .*/final"):
        check_checkpoint_fits(sft, is_grpo=True)
    with pytest.raises(ValueError, match="written by lit-grpo fit"):
        check_checkpoint_fits(grpo, is_grpo=False)


@pytest.mark.parametrize("left", ["metrics.csv", "checkpoints/last.ckpt"])
def test_a_new_run_in_a_directory_with_results_is_refused(left, here):
    write_empty(here / "run" / "config.yaml", here / "run" / "run.log")
    check_run_dir_is_new(here / "run", "resume it so")
    write_empty(here / "run" / left)
    how = (
        "It has no checkpoint: .* ckpt_path to auto" if "csv" in left else "Resume it: resume it so"
    )
    with pytest.raises(ValueError, match=f"already holds a run, .* {how}"):
        check_run_dir_is_new(here / "run", "resume it so")


def go_on(store: Path, checkpoints: list[Path | None], rank: int) -> str:
    """Return the error of a rank that goes on from its checkpoint; empty if there is none."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    try:
        check_same_checkpoint_on_ranks(checkpoints[rank])
    except UserError as error:
        return str(error)
    finally:
        torch.distributed.destroy_process_group()
    return ""


def test_ranks_that_would_go_on_from_different_checkpoints_are_refused(here):
    one, copy, older = (here / name / "step_000007.ckpt" for name in ("one", "copy", "older"))
    write_empty(one, copy, older.with_name("step_000006.ckpt"))
    (one.parent / "last.ckpt").symlink_to(one.name)
    cases = {
        "both new": ([None, None], ""),
        "copied": ([one.parent / "last.ckpt", copy], ""),
        "one is new": ([one, None], r"step_000007.ckpt of [\d,]+ bytes, rank 1 on .*: none \("),
        "one is older": ([one, older.with_name("step_000006.ckpt")], "step_000006.ckpt of"),
    }
    for name, (checkpoints, expected) in cases.items():
        ranks = (partial(go_on, here / name, checkpoints, rank) for rank in (0, 1))
        errors = run_in_processes(*ranks)
        assert errors[0] == errors[1]
        assert bool(errors[0]) == bool(expected), name
        assert re.search(expected, errors[0]), name


def test_a_directory_in_that_of_another_run_is_recognised(here):
    for place in ("project/checkpoints", "other", "old/checkpoints", "new"):
        (here / place).mkdir(parents=True)
    for file in ("other/metrics.csv", "old/metrics.csv", "new/events.jsonl"):
        (here / file).touch()
    assert enclosing_run(Path("project/runs/0")) is None  # of a project with models
    assert enclosing_run(Path("other/runs/0")) is None
    assert enclosing_run(Path("old/checkpoints/0")) == here / "old"
    assert enclosing_run(Path("new/0")) == here / "new"
    assert enclosing_run(Path("new")) is None
