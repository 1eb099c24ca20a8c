"""Whether files can be written to a place is known before there are any."""

from __future__ import annotations

import pytest

from lit_grpo.runs.files.writable import check_writable, nearest, try_writing
from lit_grpo.types import UserError


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_nearest_place_is_the_first_that_exists_above(here):
    (here / "there").mkdir()
    (here / "link").symlink_to(here / "nowhere")
    assert nearest(here / "there" / "a" / "b") == here / "there"
    assert nearest(here / "there") == here / "there"
    assert nearest(here / "link" / "a") == here / "link"


def test_a_place_is_tried_without_leaving_anything(here):
    check_writable("--out", "a/b", here / "a" / "b")
    try_writing(here)
    assert [*here.iterdir()] == []


@pytest.mark.parametrize(
    ("path", "reason"),
    [("file", "File exists"), ("file/below", "Not a directory"), ("/proc/x", r"\w+")],
)
def test_a_place_that_cannot_be_written_is_named_with_its_option(path, reason, here):
    (here / "file").touch()
    message = rf"out must be a place that can be written, got {path} \(.*: {reason}.*Set --out\."
    with pytest.raises(UserError, match=message):
        check_writable("--out", path, here / path)


def test_a_link_to_nothing_is_no_directory(here):
    (here / "link").symlink_to(here / "nowhere")
    with pytest.raises(FileExistsError) as raised:
        try_writing(here / "link")
    assert raised.value.filename == str(here / "link")
