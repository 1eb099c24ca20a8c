from __future__ import annotations

import errno

import pytest

from lit_grpo.diagnostics.errors import cause_of_error, describe_full_disk
from lit_grpo.types import EngineFailed, RankLost, UserError
from lit_grpo.types.errors import Diverged, OutOfMemory

FULL = OSError(errno.ENOSPC, "No space left on device", "runs/my/0/checkpoints/last.ckpt")


def raised_from(cause: Exception) -> Exception:
    error = RuntimeError("the checkpoint could not be written")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (FULL, "disk_full"),
        (raised_from(FULL), "disk_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
        (OutOfMemory("out of memory in the stage update"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (Diverged("the logits are not finite"), "not_finite_weights"),
        (EngineFailed("it gave up"), "engine_outage"),
        (RankLost("another process is gone"), "rank_lost"),
        (UserError("no such file"), "wrong_input"),
        (KeyboardInterrupt(), "signal"),
        (SystemExit(143), "signal"),
        (KeyError("difficulty"), "crashed"),
        (OSError(errno.EACCES, "Permission denied"), "crashed"),
    ],
    ids=str,
)
def test_an_error_has_the_cause_that_it_shows(error, cause):
    assert cause_of_error(error) == cause


def test_a_full_disk_is_said_with_the_file_and_what_to_do():
    assert describe_full_disk(raised_from(FULL)) == (
        "the disk is full: runs/my/0/checkpoints/last.ckpt. Checkpoints that were written before "
        "are intact. Free some space, and resume the run, with --ckpt_path auto if it has no "
        "checkpoint yet."
    )
    assert describe_full_disk(KeyError("x")) is None


def test_a_full_disk_without_a_file_is_said_without_the_text_of_torch():
    error = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")
    said = describe_full_disk(error)
    assert said.startswith("the disk is full. Checkpoints that were written before are intact. ")
