"""A directory is the old one or the new one, whenever the process that replaces it is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from forked import run_in_processes

from lit_grpo.types import atomic
from lit_grpo.types.atomic import replacing

NAMES = ("a.txt", "inner/b.txt")


def replace(directory: Path, text: str) -> None:
    with replacing(directory) as partial:
        for name in NAMES:
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_text(text)


def new_directory(path: Path) -> Path:
    path.mkdir()
    return path


def content(directory: Path) -> str:
    """The text that all files of a whole directory have."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    assert {str(path.relative_to(directory)) for path in found} == set(NAMES)
    (text,) = {path.read_text() for path in found}
    return text


def test_a_directory_is_written_and_replaced_and_nothing_else_is_left(tmp_path):
    for text in ("first", "second"):
        replace(tmp_path / "out" / "data", text)
        assert content(tmp_path / "out" / "data") == text
        assert os.listdir(tmp_path / "out") == ["data"]


def fail(directory: Path) -> None:
    with replacing(directory) as partial:
        (partial / "a.txt").write_text("half")
        raise ZeroDivisionError


def test_an_error_leaves_the_old_directory_and_nothing_else(tmp_path):
    replace(tmp_path / "data", "old")
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "data")
    assert content(tmp_path / "data") == "old"
    assert os.listdir(tmp_path) == ["data"]


def killed_at(moment: int, directory: Path) -> bool:
    """Replace a directory in a process that is killed at one of its calls; False if it ended."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    left = [moment]

    def audit(event: str, arguments: object) -> None:
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open", "ctypes.dlsym"):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(audit)
    replace(directory, "new")
    os._exit(0)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_directory(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    elif not atomic._exchange(new_directory(tmp_path / "one"), new_directory(tmp_path / "other")):
        pytest.skip("this file system cannot exchange directories")
    texts, num_missing = [], 0
    for moment in range(200):
        directory = tmp_path / str(moment) / "data"
        replace(directory, "old")
        is_killed = killed_at(moment, directory)
        num_missing += not directory.exists()
        if not directory.exists():
            assert content(directory.with_name("data.earlier")) == "old"
        else:
            texts.append(content(directory))
        replace(directory, "again")
        assert content(directory) == "again"
        assert os.listdir(directory.parent) == ["data"]
        if not is_killed:
            break
    assert 10 < moment < 199
    assert texts == sorted(texts, reverse=True)  # the old one up to some moment
    assert {"old", "new"} == set(texts)
    assert num_missing == (0 if exchanges else 1)


def test_what_a_killed_process_has_put_aside_is_put_back_by_the_next_call(tmp_path):
    replace(tmp_path / "data.earlier", "old")
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "data")
    assert content(tmp_path / "data") == "old"
    assert os.listdir(tmp_path) == ["data"]


def test_two_processes_write_one_after_the_other(tmp_path):
    def write(text: str) -> tuple[float, float]:
        with replacing(tmp_path / "data") as partial:
            start = time.monotonic()
            for name in NAMES:
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_text(text)
                time.sleep(0.1)
            return start, time.monotonic()

    one, other = sorted(run_in_processes(lambda: write("one"), lambda: write("other")))
    assert one[1] <= other[0]
    assert content(tmp_path / "data") in ("one", "other")
    assert os.listdir(tmp_path) == ["data"]


def test_all_files_are_on_the_disk_before_the_directory_is_moved(tmp_path, monkeypatch):
    done, sync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), sync(file))
    )
    replace(tmp_path / "data", "new")
    partial = tmp_path / "data.partial"
    *before, last = done
    assert set(before) == {str(partial), *(str(partial / name) for name in (*NAMES, "inner"))}
    assert last == str(tmp_path)  # the move


def test_files_that_are_written_again_soon_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: pytest.fail("it waits for the disk"))
    with replacing(tmp_path / "data", is_durable=False) as partial:
        (partial / "a.txt").touch()
    assert os.listdir(tmp_path / "data") == ["a.txt"]
