"""Checkpoints that are written, damaged and looked for, on a real disk."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lit_grpo.runs import checkpoint_files
from lit_grpo.runs.checkpoint_files import (
    CheckpointWriter,
    damage,
    last_checkpoint,
    link_last,
    newest_checkpoints,
    read_manifest,
)
from lit_grpo.runs.resume import find_checkpoint
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


def test_what_is_written_is_what_lightning_writes_with_a_manifest(tmp_path):
    path = tmp_path / "checkpoints" / "step_000012.ckpt"
    write(path)
    loaded = TorchCheckpointIO().load_checkpoint(path)
    assert loaded["state_dict"]["weight"].equal(torch.ones(1000))
    assert loaded["summary"] == SUMMARY
    manifest = read_manifest(path)
    assert manifest.size == path.stat().st_size
    assert manifest.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (manifest.rollout_step, manifest.optimizer_step) == (12, 24)
    assert manifest.metrics == {"reward/mean": 0.5}
    assert damage(path, reads_all=True) == ""
    assert sorted(one.name for one in path.parent.iterdir()) == [path.name, f"{path.name}.json"]


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
    assert damage(path) == ""  # the cheap look
    assert damage(path, reads_all=True) == "its content is not what was written"
    with pytest.raises(UserError, match="content is not what was written"):
        find_checkpoint(str(path), tmp_path)


def test_weights_that_are_not_finite_are_no_checkpoint_to_go_on_from(tmp_path):
    path = tmp_path / "checkpoints" / "step_000012.ckpt"
    write(path, float("inf"))
    assert damage(path) == "its weights are not finite"
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
    checkpoint_files.manifest_path(path).write_text(text)
    assert read_manifest(path) is None
    assert damage(path, reads_all=True) == ""


def test_a_full_disk_leaves_the_earlier_checkpoint_of_that_name_and_nothing_else(tmp_path):
    path = tmp_path / "step_000012.ckpt"
    write(path)
    program = (
        "import resource, signal, sys, torch\n"
        "from lit_grpo.runs.checkpoint_files import CheckpointWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"  # a write then fails with EFBIG
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "state = {'state_dict': {'weight': torch.zeros(1_000_000)}}\n"
        "CheckpointWriter().save_checkpoint(state, sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True)
    assert done.returncode != 0
    assert f"[Errno {errno.EFBIG}]" in done.stderr
    assert damage(path, reads_all=True) == ""
    assert torch.load(path)["state_dict"]["weight"].equal(torch.ones(1000))
    assert len(list(tmp_path.iterdir())) == 2


KILLS = """
import os, signal, sys, time
from pathlib import Path
import torch
from lit_grpo.runs.checkpoint_files import CheckpointWriter, damage

torch.set_num_threads(1)
path = Path(sys.argv[1])

def save(number):
    state = {"state_dict": {"weight": torch.full((2_000_000,), float(number))}}
    CheckpointWriter().save_checkpoint(state, path)

save(0)
for moment in range(12):
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        for number in range(10_000):
            save(number)
            os.write(told, b".")
    os.read(ready, 1)
    time.sleep(0.007 * moment)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    weight = torch.load(path)["state_dict"]["weight"]
    is_whole = bool((weight == weight[0]).all())
    print(os.WTERMSIG(status), repr(damage(path, reads_all=True)), is_whole)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_leaves_an_intact_checkpoint(tmp_path):
    command = [sys.executable, "-c", KILLS, tmp_path / "step_000012.ckpt"]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert done.stdout.splitlines() == ["9 '' True"] * 12, done.stderr


def test_a_save_needs_no_second_copy_of_the_weights_in_memory(tmp_path):
    program = (
        "import resource, sys, torch\n"
        "from lit_grpo.runs.checkpoint_files import CheckpointWriter\n"
        "state = {'state_dict': {str(n): torch.ones(5_000_000) for n in range(10)}}\n"  # 200 MB
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak()\n"
        "CheckpointWriter().save_checkpoint(state, sys.argv[1])\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", program, tmp_path / "large.ckpt"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 100  # MB; a copy would be 200


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
