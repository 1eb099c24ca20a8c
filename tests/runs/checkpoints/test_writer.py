"""Checkpoints that are written, whatever ends the write, on a real disk."""

from __future__ import annotations

import errno
import hashlib
import resource
import signal
import subprocess
import sys
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from forked import run_in_processes
from lightning.fabric.plugins import TorchCheckpointIO
from torch.distributed.tensor import distribute_tensor

from lit_grpo.callbacks import Checkpoints
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.runs.checkpoints.files import read_manifest, why_unusable
from lit_grpo.runs.checkpoints.writer import CheckpointWriter

SUMMARY = {"rollout_step": 12, "optimizer_step": 24, "trouble": "", "metrics": {"reward/mean": 0.5}}


def write(path) -> None:
    state = {"state_dict": {"weight": torch.ones(1000)}, "summary": SUMMARY}
    CheckpointWriter().save_checkpoint(state, path)


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
    assert why_unusable(path, reads_all=True) == ""
    assert sorted(one.name for one in path.parent.iterdir()) == [path.name, f"{path.name}.json"]


def test_a_checkpoint_is_removed_with_its_manifest(tmp_path):
    for name in ("one", "other"):
        write(tmp_path / f"{name}.ckpt")
    CheckpointWriter().remove_checkpoint(tmp_path / "one.ckpt")
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["other.ckpt", "other.ckpt.json"]


class PressesCtrlC:
    """What torch.save has in hand when the user interrupts."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGINT)
        return PressesCtrlC, ()


def test_an_interrupt_within_a_write_is_raised_as_one_and_keeps_the_file_of_before(tmp_path):
    path = tmp_path / "step_000012.ckpt"
    write(path)
    before = path.read_bytes()
    state = {"state_dict": {"weight": torch.zeros(1000), "other": PressesCtrlC()}}
    with pytest.raises(KeyboardInterrupt):
        CheckpointWriter().save_checkpoint(state, path)
    assert path.read_bytes() == before
    assert why_unusable(path, reads_all=True) == ""
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name, f"{path.name}.json"]


def write_to_a_full_disk(path: Path) -> str:
    """Return what is raised where files must not be large, in a process of its own."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails with EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    state = {"state_dict": {"weight": torch.zeros(1_000_000)}}
    try:
        CheckpointWriter().save_checkpoint(state, path)
    except Exception:
        return traceback.format_exc()
    return ""


def test_a_full_disk_leaves_the_earlier_checkpoint_of_that_name_and_nothing_else(tmp_path):
    path = tmp_path / "step_000012.ckpt"
    write(path)
    (raised,) = run_in_processes(partial(write_to_a_full_disk, path))
    assert f"[Errno {errno.EFBIG}]" in raised
    assert why_unusable(path, reads_all=True) == ""
    assert torch.load(path)["state_dict"]["weight"].equal(torch.ones(1000))
    assert len(list(tmp_path.iterdir())) == 2


KILLS = """
import os, signal, sys, time
from pathlib import Path
import torch
from lit_grpo.runs.checkpoints.files import why_unusable
from lit_grpo.runs.checkpoints.writer import CheckpointWriter

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
    print(os.WTERMSIG(status), repr(why_unusable(path, reads_all=True)), is_whole)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_leaves_an_intact_checkpoint(tmp_path):
    command = [sys.executable, "-c", KILLS, tmp_path / "step_000012.ckpt"]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert done.stdout.splitlines() == ["9 '' True"] * 12, done.stderr


def growth_of_a_save(path: Path) -> float:
    """Return by how many MB the peak memory of a process grows as it saves 200 MB.

    A save before it reads the pages of code that a forked process does not have yet.
    """
    CheckpointWriter().save_checkpoint({"state_dict": {"0": torch.ones(1)}}, path)
    state = {"state_dict": {str(n): torch.ones(2_500_000) for n in range(20)}}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    CheckpointWriter().save_checkpoint(state, path)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def test_a_save_needs_no_second_copy_of_the_weights_in_memory(tmp_path):
    (growth,) = run_in_processes(partial(growth_of_a_save, tmp_path / "large.ckpt"))
    assert growth < 100  # MB; a copy would be 200


def write_shards_in_the_background(path: Path) -> timedelta:
    """Return how long the ranks of a run wait for each other in the background."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path / 'store'}", rank=0, world_size=1
    )
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    weight = distribute_tensor(torch.ones(4), mesh)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=FSDP2Strategy(timeout_minutes=2))
    Checkpoints(dirpath=str(path), in_background=True).setup(trainer, L.LightningModule(), "fit")
    writer = trainer.strategy.checkpoint_io
    writer.save_checkpoint({"state_dict": {"weight": weight}}, path / "last.ckpt")
    writer.wait()
    backend = writer._group._get_backend(torch.device("cpu"))
    torch.distributed.destroy_process_group()
    return backend.options._timeout


def test_ranks_that_write_in_the_background_wait_as_long_as_the_strategy_says(tmp_path):
    found = run_in_processes(partial(write_shards_in_the_background, tmp_path))
    assert found == [timedelta(minutes=2)]
    assert not why_unusable(tmp_path / "last.ckpt")
