"""Write checkpoints whole or not at all, each with a manifest of what was written."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lit_grpo.distributed.checkpoints import (
    WRITE,
    is_sharded,
    local_part,
    read_whole,
    save_sharded,
)
from lit_grpo.distributed.ranks import gather_objects, get_rank
from lit_grpo.runs.checkpoints.atomic_save import (
    forget_earlier,
    manifest_path,
    replace_directory,
    saving,
)
from lit_grpo.runs.checkpoints.files import (
    Manifest,
    remove,
    sha256_of,
    size_of,
    write_manifest,
)
from lit_grpo.runs.files.space import checkpoint_bytes, warn_of_space
from lit_grpo.types.atomic import partial_path, sync_files
from lit_grpo.types.errors import keeping_interrupts
from lit_grpo.types.saved_state import saved_state

_WEIGHTS = {"state_dict"}
_OF_SHARDS = {"state_dict", "optimizer_states", WRITE}
"""Parts of a sharded checkpoint that `torch.save` does not write."""


class CheckpointWriter(TorchCheckpointIO):
    """Write checkpoints next to their targets, tensor by tensor, and move them into place.

    A kill or a full disk leaves the earlier checkpoint of that name. What a killed process has left
    is removed by the next save. Lightning would copy the whole checkpoint in memory first. Each one
    gets a ``Manifest``. The checkpoint of a sharded model is a directory, which all ranks write.

    Args:
        in_background: Write sharded checkpoints in a thread, from a copy in host memory. One is
            written at a time, and an error is raised at the next save.
        timeout: How long a rank waits for the others in the background; None for torch's default.
    """

    def __init__(self, *, in_background: bool = False, timeout: timedelta | None = None) -> None:
        super().__init__()
        self._timeout = timeout
        self._in_background = in_background
        self._group: torch.distributed.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1)
        self._unfinished: list[Future[None]] = []

    def wait(self) -> None:
        """Wait until everything is written."""
        while self._unfinished:
            self._unfinished.pop(0).result()

    def when_written(self, function: Callable[[], None]) -> None:
        """Call a function once pending saves are written; skip it if they failed."""
        if not self._unfinished:
            function()
            return
        written = self._unfinished[-1]

        def call() -> None:
            if written.exception() is None:
                function()

        self._unfinished.append(self._thread.submit(call))

    @keeping_interrupts()
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self.wait()
        target = Path(path)
        has_shards = is_sharded(checkpoint)
        as_they_are = _OF_SHARDS if has_shards else _WEIGHTS
        checkpoint = {
            name: one if name in as_they_are else saved_state(f"checkpoint.{name}", one)
            for name, one in checkpoint.items()
        }
        if has_shards:
            self._save_directory(checkpoint, target)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with saving(target.parent):
            self._save_file(checkpoint, target)

    def _save_file(self, checkpoint: dict[str, Any], target: Path) -> None:
        num_bytes, memory_bytes = checkpoint_bytes(checkpoint)
        warn_of_space(target, num_bytes=num_bytes, memory_bytes=memory_bytes)
        partial = partial_path(target)
        try:
            with partial.open("wb") as file:
                hashed = _HashedFile(file)
                torch.save(checkpoint, hashed)  # type: ignore[arg-type]  # it is only written to
                _flush(file)
            manifest = Manifest(
                size=partial.stat().st_size,
                sha256=hashed.hash.hexdigest(),
                is_finite=_is_finite(checkpoint["state_dict"]),
                **checkpoint.get("summary", {}),
            )
            # No manifest until the new one exists: the old one would call the new file damaged.
            manifest_path(target).unlink(missing_ok=True)
            os.replace(partial, target)
            write_manifest(manifest, target)
        finally:
            partial.unlink(missing_ok=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            remove(Path(path))

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        if Path(path).is_dir():
            return read_whole(Path(path))
        if not args:
            # Lightning's default is a function, which the 8-bit states of torchao cannot take.
            options.setdefault("map_location", "cpu")
        loaded: dict[str, Any] = super().load_checkpoint(path, *args, **options)
        return loaded

    def _save_directory(self, checkpoint: dict[str, Any], target: Path) -> None:
        """Write a sharded checkpoint; every rank must call this."""
        num_bytes, memory_bytes = checkpoint_bytes(checkpoint)
        if self._in_background:
            self._group = self._group or torch.distributed.new_group(
                backend="gloo", timeout=self._timeout
            )
            memory_bytes = num_bytes
        num_bytes = sum(gather_objects(num_bytes))
        partial = partial_path(target)
        with ExitStack() as stack:
            if get_rank() == 0:
                target.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(saving(target.parent))
                warn_of_space(target, num_bytes=num_bytes, memory_bytes=memory_bytes)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
            is_finite = all(gather_objects(_is_finite(checkpoint["state_dict"])))
            wait = save_sharded(checkpoint, partial, background=self._group)
            summary = checkpoint.get("summary", {})
            lock = stack.pop_all()

        def finish() -> None:
            with lock:
                wait()
                if get_rank() == 0:
                    move_directory(partial, target, is_finite=is_finite, **summary)

        if self._in_background:
            self._unfinished.append(self._thread.submit(finish))
        else:
            finish()


def move_directory(partial: Path, target: Path, **known: Any) -> None:
    """Move a complete directory to its place, and write its manifest."""
    sync_files(partial)
    manifest = Manifest(size=size_of(partial), sha256=sha256_of(partial), **known)
    replace_directory(partial, target)
    write_manifest(manifest, target)
    forget_earlier(target)


class _HashedFile:
    """A file that is written from start to end and hashed meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _is_finite(weights: Mapping[str, Any]) -> bool:
    """Return whether all weights, or all of this rank's parts of them, are finite."""
    given = (local_part(one) for one in weights.values() if torch.is_tensor(one))
    tensors = (one for one in given if one.is_floating_point())
    return all(bool(one.isfinite().all()) for one in tensors)


def when_written(trainer: L.Trainer, function: Callable[[], None]) -> None:
    """Call a function once the checkpoint that was saved last is written."""
    writer = trainer.strategy.checkpoint_io
    if isinstance(writer, CheckpointWriter):
        writer.when_written(function)
    else:
        function()


def wait_until_written(trainer: L.Trainer) -> None:
    """Wait until every rank has written what was saved; every rank must call this."""
    writer = trainer.strategy.checkpoint_io
    if isinstance(writer, CheckpointWriter):
        writer.wait()
    trainer.strategy.barrier("Checkpoints")
