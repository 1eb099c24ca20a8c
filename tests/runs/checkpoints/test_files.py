"""Checkpoints that are damaged and looked for, on a real disk."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lit_grpo.runs.checkpoints.atomic_save import manifest_path
from lit_grpo.runs.checkpoints.files import (
    last_checkpoint,
    link_last,
    newest_checkpoints,
    read_manifest,
    why_unusable,
)
from lit_grpo.runs.checkpoints.resume import find_checkpoint
from lit_grpo.runs.checkpoints.writer import CheckpointWriter
from lit_grpo.types import UserError

SUMMARY = {"rollout_step": 12, "optimizer_step": 24, "trouble": "", "metrics": {"reward/mean": 0.5}}


def checkpoint(value: float = 1.0, size: int = 1000) -> dict:
    weight = torch.full((size,), value)
    return {"state_dict": {"weight": weight, "index": torch.arange(3)}, "summary": SUMMARY}


def write(path, value: float = 1.0) -> None:
    CheckpointWriter().save_checkpoint(checkpoint(value), path)


def test_the_last_checkpoint_is_the_most_recently_written(tmp_path):
    assert last_checkpoint(tmp_path) is None
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    for age, name in enumerate(["best.ckpt", "last.ckpt", "step_9.ckpt", "last.ckpt.partial"]):
        torch.save({}, directory / name)
        os.utime(directory / name, (1000 - age, 1000 - age))
    assert last_checkpoint(tmp_path) == directory / "best.ckpt"


def test_of_a_copied_run_the_last_checkpoint_is_not_the_one_that_was_copied_last(tmp_path):
    times = {
        "step_3.ckpt": "2026-11-25T10:00:00.100+00:00",
        "step_6.ckpt": "2026-11-25T10:00:00.900+00:00",
        "step_9.ckpt": "2026-11-25T09:00:00+00:00",  # before a rollback
    }
    for age, (name, time) in enumerate(times.items()):
        path = tmp_path / "checkpoints" / name
        write(path)
        manifest = json.loads(manifest_path(path).read_text())
        manifest_path(path).write_text(json.dumps(manifest | {"time": time}))
        os.utime(path, (1000 + age, 1000 + age))
    found = [path.name for path in newest_checkpoints(tmp_path)]
    assert found == ["step_6.ckpt", "step_3.ckpt", "step_9.ckpt"]


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not written to its end"),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), r"bytes where \d,\d+ were"),
        (lambda path: path.write_bytes(b""), "not written to its end"),
    ],
    ids=["cut off", "longer", "empty"],
)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(tmp_path, caplog, harm, why):
    older, newer = (tmp_path / "checkpoints" / f"step_{n}.ckpt" for n in (1, 2))
    write(older)
    write(newer)
    os.utime(older, (1, 1))
    assert find_checkpoint("last", tmp_path) == str(newer)
    harm(newer)
    assert find_checkpoint("last", tmp_path) == str(older)
    assert f"{newer} is damaged" in caplog.text
    with pytest.raises(UserError, match=why):
        find_checkpoint(str(newer), tmp_path)


def test_one_flipped_bit_is_noticed_before_a_resume(tmp_path):
    path = tmp_path / "checkpoints" / "step_000012.ckpt"
    write(path)
    content = bytearray(path.read_bytes())
    content[content.find(torch.ones(4).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert why_unusable(path) == ""  # the cheap look
    assert why_unusable(path, reads_all=True) == "its content is not what was written"
    with pytest.raises(UserError, match="content is not what was written"):
        find_checkpoint(str(path), tmp_path)


def test_weights_that_are_not_finite_are_no_checkpoint_to_go_on_from(tmp_path):
    path = tmp_path / "checkpoints" / "step_000012.ckpt"
    write(path, float("inf"))
    assert why_unusable(path) == "its weights are not finite"
    assert last_checkpoint(tmp_path) is None


def test_a_checkpoint_of_others_without_a_manifest_can_be_used(tmp_path):
    path = tmp_path / "checkpoints" / "epoch=0-step=3.ckpt"
    TorchCheckpointIO().save_checkpoint(checkpoint(), path)
    assert read_manifest(path) is None
    assert find_checkpoint("last", tmp_path) == str(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"size": 3}', "null"])
def test_a_manifest_that_cannot_be_read_is_none(tmp_path, text):
    path = tmp_path / "step_000012.ckpt"
    write(path)
    manifest_path(path).write_text(text)
    assert read_manifest(path) is None
    assert why_unusable(path, reads_all=True) == ""


def test_the_link_to_the_last_one_is_replaced_and_counts_as_it(tmp_path):
    directory = tmp_path / "checkpoints"
    for number in (1, 2):
        path = directory / f"step_{number}.ckpt"
        write(path)
        os.utime(path, (number, number))
        link_last(path)
    assert os.readlink(directory / "last.ckpt") == "step_2.ckpt"
    assert [path.name for path in newest_checkpoints(tmp_path)] == [
        "last.ckpt",
        "step_2.ckpt",
        "step_1.ckpt",
    ]
    assert read_manifest(directory / "last.ckpt") == read_manifest(directory / "step_2.ckpt")
    (directory / "step_2.ckpt").unlink()
    assert last_checkpoint(tmp_path) == directory / "step_1.ckpt"


def test_a_copied_run_is_resumed_without_links(tmp_path):
    write(tmp_path / "run/checkpoints/step_1.ckpt")
    link_last(tmp_path / "run/checkpoints/step_1.ckpt")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    found = find_checkpoint("last", tmp_path / "copy")
    assert found == str(tmp_path / "copy/checkpoints/last.ckpt")
