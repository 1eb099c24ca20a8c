"""What a disk that is full leaves of prepared data."""

import errno

import pytest

from lit_grpo.cli.prepare.write import _replacing
from lit_grpo.types import UserError


def test_a_full_disk_is_an_error_for_the_user_and_leaves_what_was_there(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").write_text("old")
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(UserError, match=r"data cannot be written: the disk is full.* Free some"),
        _replacing(tmp_path / "data"),
    ):
        raise full
    assert (tmp_path / "data" / "train.parquet").read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["data"]
