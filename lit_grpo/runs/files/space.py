"""Warn before a save whose files may not fit on the disk, or whose copies may not fit in memory."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lit_grpo.distributed.checkpoints import local_part

log = logging.getLogger(__name__)


def warn_of_space(path: Path, *, num_bytes: int, memory_bytes: int) -> None:
    """Log a warning, with the sizes and what to do, if there is not enough space for a save.

    Args:
        path: What will be written; it need not exist.
        num_bytes: Its size.
        memory_bytes: Host memory that the save takes for a while.
    """
    folder = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        log.warning(
            "%s needs %s, and its disk has %s left, so writing it will probably fail. Free space "
            "there now: remove what you do not need, such as checkpoints of earlier runs.",
            *(path, format_size(num_bytes), format_size(free)),
        )
    available = psutil.virtual_memory().available
    if available < memory_bytes:
        log.warning(
            "writing %s takes %s of host memory for a while, and %s are available, so the system "
            "may end this process. End other processes, or give the job more memory next time.",
            *(path, format_size(memory_bytes), format_size(available)),
        )


def checkpoint_bytes(checkpoint: Mapping[str, Any]) -> tuple[int, int]:
    """Return the size of a checkpoint's tensors, and the host memory that writing them takes.

    Of a sharded one, this rank's share.
    A tensor on an accelerator is copied to host memory, one at a time; one on the host is not.
    """
    tensors = {one.data_ptr(): one for one in _tensors(checkpoint)}.values()
    copied = [one.nbytes for one in tensors if one.device.type != "cpu"]
    return sum(one.nbytes for one in tensors), max(copied, default=0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if torch.is_tensor(value):
        yield local_part(value)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def format_size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
