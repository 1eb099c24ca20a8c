"""What killed saves leave, at each moment of them, and who puts it back or removes it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from processes import kill_group, start

from lit_grpo.__main__ import main
from lit_grpo.runs.checkpoints.atomic_save import clean_up_killed_saves, find_leftovers, saving
from lit_grpo.runs.checkpoints.files import read_manifest, why_unusable
from lit_grpo.runs.checkpoints.resume import find_checkpoint
from lit_grpo.runs.checkpoints.writer import CheckpointWriter, move_directory
from lit_grpo.types.atomic import partial_path

NAME = "step_000012.ckpt"
STATE = {"state_dict": {"weight": torch.ones(1000)}}


def fill(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "meta.pt").write_text(text)
    (directory / ".metadata").write_text(text)
    return directory


def replace(target: Path, text: str) -> None:
    with saving(target.parent):
        move_directory(fill(partial_path(target), text), target, is_finite=True)


def die_at(moment: int) -> None:
    """Kill this process at the call of that number which changes or opens a file."""
    left = [moment]

    def audit(event: str, arguments: object) -> None:
        if event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "open"):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(audit)


def replace_and_die(directory: Path, name: str) -> int:
    """Kill processes that replace a directory, each one moment later; return their number."""
    for moment in range(200):
        target = directory / str(moment) / name
        target.parent.mkdir(parents=True)
        replace(target, "old")
        child = os.fork()
        if not child:
            die_at(moment)
            replace(target, "the new")
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            break
    assert 10 < moment < 199
    return moment


@pytest.mark.slow
def test_a_checkpoint_that_is_replaced_is_the_old_or_the_new_one_after_a_kill_at_any_moment(
    tmp_path,
):
    num_moments = replace_and_die(tmp_path, f"checkpoints/{NAME}")
    contents, missing = [], 0
    for moment in range(num_moments + 1):
        path = tmp_path / str(moment) / "checkpoints" / NAME
        missing += not path.exists()
        assert find_checkpoint("auto", tmp_path / str(moment)) == str(path)
        assert why_unusable(path, reads_all=True) == ""
        assert {one.name for one in path.parent.iterdir()} <= {NAME, f"{NAME}.json"}
        contents.append((path / "meta.pt").read_text())
        assert (path / ".metadata").read_text() == contents[-1]
        if contents[-1] == "old":  # with the manifest that describes it
            assert read_manifest(path) is not None
    assert contents == sorted(contents)  # the new one from some moment on
    assert {"old", "the new"} == set(contents)
    assert missing  # the kills have hit the moment between the two moves


def test_each_file_of_a_directory_is_on_the_disk_before_it_is_moved(tmp_path, monkeypatch):
    done, sync, move = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), sync(file))
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append(paths[0]), move(*paths)))
    partial = tmp_path / f"{NAME}.partial"
    (partial / "zero").mkdir(parents=True)
    files = [partial / "meta.pt", partial / "zero" / "rank_0.pt"]
    for path in files:
        path.write_text("x")
    move_directory(partial, tmp_path / NAME, is_finite=True)
    before = done[: done.index(partial)]
    assert set(before) == set(map(str, [*files, partial, partial / "zero"]))
    assert done[-1] == str(tmp_path)  # the moves


def leave(directory: Path) -> list[str]:
    """Write what killed saves of files and directories leave; return the names."""
    directory.mkdir(parents=True)
    for name in ("step_000003.ckpt.partial", "best.ckpt.json.partial", "user.partial"):
        (directory / name).write_bytes(b"x" * 1000)
    for name in ("step_000002.ckpt.partial", "step_000001.ckpt.earlier"):
        (directory / name).mkdir()
        (directory / name / "meta.pt").write_bytes(b"x" * 1000)
    (directory / "step_000001.ckpt.earlier.json").write_text("{}")
    (directory / "step_000001.ckpt").mkdir()
    return [path.name for path in find_leftovers(directory)]


LEFT = [
    "best.ckpt.json.partial",
    "step_000001.ckpt.earlier",
    "step_000001.ckpt.earlier.json",
    "step_000002.ckpt.partial",
    "step_000003.ckpt.partial",
]


def test_the_next_save_removes_what_was_left_and_nothing_else(tmp_path):
    assert leave(tmp_path / "checkpoints") == LEFT
    path = tmp_path / "checkpoints" / NAME
    CheckpointWriter().save_checkpoint(STATE, path)
    names = sorted(one.name for one in path.parent.iterdir())
    assert names == ["step_000001.ckpt", NAME, f"{NAME}.json", "user.partial"]


def test_a_resume_removes_what_was_left(tmp_path, caplog):
    directory = tmp_path / "checkpoints"
    leave(directory)
    torch.save(STATE, directory / NAME)
    assert find_checkpoint("last", tmp_path) == str(directory / NAME)
    assert find_leftovers(directory) == []


def test_the_earlier_one_of_a_path_that_is_named_comes_back_with_its_manifest(tmp_path):
    earlier = tmp_path / f"{NAME}.earlier"
    earlier.mkdir()
    for name in ("meta.pt", ".metadata"):
        (earlier / name).touch()
    (tmp_path / f"{NAME}.earlier.json").write_text("{}")
    other = tmp_path / "other.ckpt"
    torch.save(STATE, other)
    (tmp_path / "download.ckpt.partial").touch()
    find_checkpoint(str(other), tmp_path)
    assert earlier.exists()
    assert find_checkpoint(str(tmp_path / NAME), tmp_path) == str(tmp_path / NAME)
    assert (tmp_path / f"{NAME}.json").exists()


HOLD = """
import sys, time
from pathlib import Path
from lit_grpo.runs.checkpoints.atomic_save import saving
with saving(Path(sys.argv[1])):
    Path(sys.argv[1], "step_000009.ckpt.partial").mkdir()
    print("saving", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_save_that_runs_is_left_alone_until_its_process_is_gone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lit_grpo.runs.checkpoints.atomic_save.RESUME_WAIT_SECONDS", 0.1)
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    torch.save(STATE, directory / NAME)
    writer = start([sys.executable, "-c", HOLD, str(directory)])
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "saving\n"
        clean_up_killed_saves(directory)
        assert [path.name for path in find_leftovers(directory)] == ["step_000009.ckpt.partial"]
        assert main(["checkpoints", str(tmp_path)]) == 0
        assert "A checkpoint is being written: step_000009.ckpt.partial" in capsys.readouterr().out
    finally:
        kill_group(writer)
        writer.wait()
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert (
        "Left by a save that was killed: step_000009.ckpt.partial (0 B" in capsys.readouterr().out
    )
    clean_up_killed_saves(directory)
    assert sorted(path.name for path in directory.iterdir()) == [NAME]


@pytest.mark.parametrize("has_others", [False, True])
def test_the_command_lists_what_was_left_and_what_will_come_back(tmp_path, capsys, has_others):
    directory = tmp_path / "checkpoints"
    leave(directory)
    (directory / "step_000001.ckpt").rmdir()
    if has_others:
        torch.save(STATE, directory / NAME)
    assert main(["checkpoints", str(tmp_path)]) == (0 if has_others else 2)
    said = capsys.readouterr()
    text = said.out if has_others else said.err
    assert f"Left by a save that was killed: {', '.join(LEFT)} (4.0 kB together)." in text
    assert "Until then step_000001.ckpt is missing" in text


def test_a_directory_that_may_only_be_read_is_left_as_it_is(tmp_path, monkeypatch):
    leave(tmp_path / "checkpoints")

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with saving(tmp_path / "checkpoints"):
        pass
    assert [path.name for path in find_leftovers(tmp_path / "checkpoints")] == LEFT
