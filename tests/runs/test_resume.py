from __future__ import annotations

from pathlib import Path

import pytest

from lit_grpo.runs.resume import find_checkpoint, refuse_used


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_checkpoint_is_found_by_path_and_as_the_last_of_the_run(here):
    touch(here / "run" / "checkpoints" / "last.ckpt", here / "other.ckpt")
    assert find_checkpoint("last", here / "run") == str(here / "run/checkpoints/last.ckpt")
    assert find_checkpoint("other.ckpt", here / "run") == "other.ckpt"
    with pytest.raises(ValueError, match="Omit ckpt_path"):
        find_checkpoint("last", here / "empty")
    with pytest.raises(ValueError, match=r"none\.ckpt: no such checkpoint"):
        find_checkpoint("none.ckpt", here / "run")


@pytest.mark.parametrize("left", ["metrics.csv", "checkpoints/last.ckpt"])
def test_a_new_run_in_a_directory_with_results_is_refused(left, here):
    touch(here / "run" / "config.yaml", here / "run" / "run.log")
    refuse_used(here / "run")
    touch(here / "run" / left)
    with pytest.raises(ValueError, match="already holds a run"):
        refuse_used(here / "run")
