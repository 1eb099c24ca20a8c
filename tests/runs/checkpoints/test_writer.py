"""Checkpoints that are written, whatever ends the write, on a real disk."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
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
from lit_grpo.runs.checkpoints.files import damage, read_manifest
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
    assert damage(path, reads_all=True) == ""
    assert sorted(one.name for one in path.parent.iterdir()) == [path.name, f"{path.name}.json"]


def test_a_full_disk_leaves_the_earlier_checkpoint_of_that_name_and_nothing_else(tmp_path):
    path = tmp_path / "step_000012.ckpt"
    write(path)
    program = (
        "import resource, signal, sys, torch\n"
        "from lit_grpo.runs.checkpoints.writer import CheckpointWriter\n"
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
from lit_grpo.runs.checkpoints.files import damage
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
        "from lit_grpo.runs.checkpoints.writer import CheckpointWriter\n"
        "state = {'state_dict': {str(n): torch.ones(5_000_000) for n in range(10)}}\n"  # 200 MB
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak()\n"
        "CheckpointWriter().save_checkpoint(state, sys.argv[1])\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", program, tmp_path / "large.ckpt"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 100  # MB; a copy would be 200


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
    assert not damage(tmp_path / "last.ckpt")
