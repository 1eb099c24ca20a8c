"""A directory is the old one or the new one, whenever the process that replaces it is killed."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from forked import receive, start_process
from killed import killed_at
from worker_processes import wait_until

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


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_directory(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    elif not atomic._exchange(new_directory(tmp_path / "one"), new_directory(tmp_path / "other")):
        pytest.skip("this file system cannot exchange directories")
    monkeypatch.setattr(os, "fsync", lambda _: None)  # only matters if the machine crashes
    texts, num_missing = [], 0
    for moment in range(200):
        directory = tmp_path / str(moment) / "data"
        replace(directory, "old")
        is_killed = killed_at(moment, lambda at=directory: replace(at, "new"))
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


def waits_for_a_lock(pid: int) -> bool:
    return any("->" in line and str(pid) in line.split() for line in open("/proc/locks"))


def test_two_processes_write_one_after_the_other(tmp_path):
    def write(text, sender):
        with replacing(tmp_path / "data") as directory:
            sender.send("within")
            for name in NAMES:
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_text(text)
            if text == "one":
                wait_until((tmp_path / "go").exists)

    one, told = start_process(partial(write, "one"))
    assert receive(told) == "within"
    other, told = start_process(partial(write, "other"))
    wait_until(lambda: waits_for_a_lock(other.pid))
    assert not told.poll()
    (tmp_path / "go").touch()
    assert receive(told) == "within"
    for process in (one, other):
        process.join(60)
    assert content(tmp_path / "data") == "other"
    assert sorted(os.listdir(tmp_path)) == ["data", "go"]


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


@pytest.mark.slow
def test_files_that_are_written_again_soon_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: pytest.fail("it waits for the disk"))
    with replacing(tmp_path / "data", is_durable=False) as partial:
        (partial / "a.txt").touch()
    assert os.listdir(tmp_path / "data") == ["a.txt"]
