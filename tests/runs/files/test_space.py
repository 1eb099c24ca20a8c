"""What does not fit is said before it is written."""

from __future__ import annotations

import shutil
from collections import namedtuple

import torch

from lit_grpo.runs.checkpoints.writer import CheckpointWriter
from lit_grpo.runs.files.space import checkpoint_bytes, format_size, warn_of_space

Usage = namedtuple("Usage", ["total", "used", "free"])


def test_what_fits_is_not_mentioned(tmp_path, caplog):
    warn_of_space(tmp_path / "new" / "final", num_bytes=1000, memory_bytes=1000)
    assert not caplog.records


def test_a_warning_has_the_sizes_and_what_to_do(tmp_path, caplog):
    path = tmp_path / "new" / "final"
    warn_of_space(path, num_bytes=5 * 10**18, memory_bytes=3 * 10**18)
    disk, memory = (record.getMessage() for record in caplog.records)
    free = format_size(shutil.disk_usage(tmp_path).free).split()[1]
    assert disk.startswith(f"{path} needs 5000000 TB, and its disk has ")
    assert f"{free} left, so writing it will probably fail. Free space there now" in disk
    assert memory.startswith(f"writing {path} takes 3000000 TB of host memory for a while, and ")
    assert "give the job more memory" in memory
    assert not path.parent.exists()


def test_a_checkpoint_says_so_before_it_is_written(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 3000, 3000))
    path = tmp_path / "checkpoints" / "step_000001.ckpt"
    CheckpointWriter().save_checkpoint({"state_dict": {"weight": torch.ones(1000)}}, path)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} needs 4.0 kB, and its disk has 3.0 kB left")
    assert path.exists()


def test_a_tensor_counts_once_and_takes_memory_only_where_it_is_copied():
    weight, moment = torch.ones(10), torch.ones(5, dtype=torch.bfloat16)
    checkpoint = {
        "state_dict": {"embedding": weight, "head": weight},
        "optimizer_states": [{"state": {0: {"moments": (moment,), "step": 3}}}],
    }
    assert checkpoint_bytes(checkpoint) == (50, 0)
    on_device = torch.empty(7, device="meta")
    assert checkpoint_bytes(checkpoint | {"more": on_device}) == (78, 28)
