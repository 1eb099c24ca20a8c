"""Rows that stay on the disk: the same as those that are read, from a copy that is made once."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from prepared_data import write_prepared

from lit_grpo.data.rows import mapped
from lit_grpo.data.rows.filters import failed_filter
from lit_grpo.data.rows.mapped import MappedRows
from lit_grpo.data.rows.prepared import find_prepared
from lit_grpo.types import UserError


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Spread the rows over several pieces of the copy, of which the last is not full."""
    monkeypatch.setattr(mapped, "ROWS_PER_BATCH", 7)


@pytest.fixture
def split(tmp_path):
    return find_prepared(str(write_prepared(tmp_path / "prepared", num_train=12))).split("train")


def copies(split) -> list:
    return sorted((split.path.parent / ".arrow").iterdir())


def test_rows_are_those_of_the_file(split):
    rows, expected = MappedRows(split.path), split.rows()
    assert len(rows) == len(expected) == 24
    assert [*rows] == expected
    assert rows[-1] == expected[-1]
    assert rows[5:20:3] == expected[5:20:3]
    assert rows[9].columns["rubric"][0] == {"criterion": "names a colour", "weight": 4}
    with pytest.raises(IndexError):
        rows[24]


@pytest.mark.parametrize(
    "where",
    [
        {"source": "open"},
        {"gold_range": [0.5, None]},
        {"prompt_characters": [None, 18]},
        {"rubric[].criterion": [["names a colour", "is short"]]},
        {"no_such_column": 1},
        {},
    ],
    ids=str,
)
def test_filters_keep_the_rows_that_they_keep_of_a_list(split, where):
    expected = [row for row in split.rows() if failed_filter(row.columns, where) is None]
    found = MappedRows(split.path).where(where)
    assert [*found] == expected
    assert [one["id"] for one in found.columns("id", "absent")] == [row.id for row in expected]


def test_selected_and_changed_rows_are_found_by_their_ids(split):
    rows = MappedRows(split.path)
    kept = rows.where({"source": "open"}).then(lambda row: replace(row, id=row.id.upper()))
    assert kept.find(["open:3", "open:8", "verifiable:3"]) == [3, 8]
    assert kept[3].id == "OPEN:3"
    assert rows[7].id == "open:3"
    assert [row.id for row in kept.select([number == 2 for number in range(12)])] == ["OPEN:2"]


def test_the_copy_is_made_once_and_again_when_the_file_changes(split):
    MappedRows(split.path)
    (copy,) = copies(split)
    made = copy.stat()
    rows = MappedRows(split.path)
    assert copies(split) == [copy]
    assert copy.stat() == made
    shutil.copy(split.path.parent / "holdout.parquet", split.path)
    assert len(MappedRows(split.path)) == 4
    (other,) = copies(split)
    assert other != copy
    assert rows[23].id == "open:11"  # what a run has open stays


def test_what_a_killed_process_has_left_of_a_copy_is_no_copy(split):
    MappedRows(split.path)
    (copy,) = copies(split)
    copy.rename(copy.with_suffix(".arrow.partial"))
    copy.with_suffix(".arrow.partial").write_bytes(b"cut short")
    assert len(MappedRows(split.path)) == 24
    assert copies(split) == [copy]


def test_processes_that_open_a_file_together_make_one_copy(split, monkeypatch):
    convert, made = mapped._convert, []
    monkeypatch.setattr(mapped, "_convert", lambda *paths: made.append(convert(*paths)))
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(MappedRows, [split.path] * 4)]
    assert [len(rows) for rows in found] == [24] * 4
    assert len(made) == 1


def test_a_copy_goes_into_the_cache_if_the_directory_cannot_be_written_to(
    split, monkeypatch, tmp_path
):
    monkeypatch.setattr(mapped, "CACHE", tmp_path / "cache")
    (split.path.parent / ".arrow").write_text("not a directory")
    assert MappedRows(split.path)[0].id == "verifiable:0"
    assert len([*(tmp_path / "cache").rglob("*.arrow")]) == 1
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert MappedRows(split.path)[0].id == "verifiable:0"
    os.utime(split.path, ns=(1, 1))
    with pytest.raises(UserError, match=r"neither .* nor .*cache can be written to"):
        MappedRows(split.path)


def test_a_disk_without_room_for_the_copy_is_said(split, monkeypatch):
    little = shutil.disk_usage(split.path.parent)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: little)
    with pytest.raises(UserError, match=r"left, but the uncompressed copy of train.parquet needs"):
        MappedRows(split.path)
    assert not copies(split)


def test_a_file_that_is_damaged_inside_is_named_and_leaves_no_copy(split):
    whole = split.path.read_bytes()
    split.path.write_bytes(whole[:40] + bytes(400) + whole[440:])
    with pytest.raises(UserError, match=r"train\.parquet is damaged: .*Prepare the data again"):
        MappedRows(split.path)
    assert copies(split) == []
