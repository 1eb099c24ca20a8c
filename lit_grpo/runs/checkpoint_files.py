"""The files of checkpoints: written at once or not at all, and checked before they are used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lit_grpo.distributed import gather_objects, get_rank
from lit_grpo.distributed.checkpoints import (
    is_complete,
    is_sharded,
    local_part,
    read_others,
    read_whole,
    save_sharded,
    sync,
    sync_files,
)
from lit_grpo.runs.saves import (
    forget_earlier,
    manifest_path,
    partial_path,
    replace_directory,
    saving,
)
from lit_grpo.runs.space import checkpoint_bytes, warn_of_space

LAST = "last.ckpt"
"""A link to the checkpoint that was written last."""
SUMMARY = {"reward/mean": "reward", "val/accuracy": "accuracy", "sft/loss": "loss"}
"""Metric that every manifest has, where it was logged -> its short name."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a checkpoint without reading it, ``step_000120.ckpt.json``."""

    size: int
    """In bytes."""
    sha256: str
    is_finite: bool
    """Whether all weights are finite numbers."""
    rollout_step: int | None = None
    """Rollout steps that were finished, in SFT batches."""
    optimizer_step: int | None = None
    time: str = ""
    """When it was written, as ISO 8601."""
    trouble: str = ""
    """What a callback had noticed that may make the run useless; empty for a healthy run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Main metrics of the last steps."""

    @property
    def is_healthy(self) -> bool:
        return self.is_finite and not self.trouble


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if it has none that can be read."""
    try:
        values = json.loads(manifest_path(checkpoint.resolve()).read_text())
        known = {one.name for one in fields(Manifest)}
        return Manifest(**{name: value for name, value in values.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


class CheckpointWriter(TorchCheckpointIO):
    """Write checkpoints beside their targets, tensor by tensor, and move them into place.

    A kill or a full disk leaves the earlier checkpoint of that name. What a killed process has left
    is removed by the next save. Lightning would copy the whole checkpoint in memory first. Each one
    gets a ``Manifest``. The checkpoint of a sharded model is a directory, which all ranks write.

    Args:
        in_background: Write sharded checkpoints in a thread, from a copy in host memory. One is
            written at a time, and an error is raised at the next save.
    """

    def __init__(self, *, in_background: bool = False) -> None:
        super().__init__()
        self._in_background = in_background
        self._group: torch.distributed.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1)
        self._unfinished: list[Future[None]] = []

    def wait(self) -> None:
        """Wait until everything is written."""
        while self._unfinished:
            self._unfinished.pop(0).result()

    def when_written(self, function: Callable[[], None]) -> None:
        """Call a function after what has been saved so far, in the background if that is there."""
        if self._unfinished:
            self._unfinished.append(self._thread.submit(function))
        else:
            function()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self.wait()
        target = Path(path)
        if is_sharded(checkpoint):
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
            # Without one until the new one is there: the old one would call the new file damaged.
            manifest_path(target).unlink(missing_ok=True)
            os.replace(partial, target)
            _write_manifest(manifest, target)
        finally:
            partial.unlink(missing_ok=True)

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
            self._group = self._group or torch.distributed.new_group(backend="gloo")
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
    manifest = Manifest(size=size_of(partial), sha256=_sha256(partial), **known)
    replace_directory(partial, target)
    _write_manifest(manifest, target)
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


def _write_manifest(manifest: Manifest, checkpoint: Path) -> None:
    path = manifest_path(checkpoint)
    partial = partial_path(path)
    with partial.open("wb") as file:
        file.write(json.dumps(asdict(manifest), indent=2).encode())
        _flush(file)
    os.replace(partial, path)
    sync(path.parent)  # the moves


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _is_finite(weights: Mapping[str, Any]) -> bool:
    """Return whether all weights, or all of this rank's parts of them, are finite."""
    given = (local_part(one) for one in weights.values() if torch.is_tensor(one))
    tensors = (one for one in given if one.is_floating_point())
    return all(bool(one.isfinite().all()) for one in tensors)


def link_last(checkpoint: Path) -> None:
    """Let ``last.ckpt`` name a checkpoint of the same directory, where links are possible."""
    partial = partial_path(checkpoint.with_name(LAST))
    partial.unlink(missing_ok=True)
    with suppress(OSError):
        partial.symlink_to(checkpoint.name)
        os.replace(partial, checkpoint.with_name(LAST))


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint and its manifest."""
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        shutil.rmtree(checkpoint)
    checkpoint.unlink(missing_ok=True)
    manifest_path(checkpoint).unlink(missing_ok=True)


def newest_checkpoints(run_dir: str | Path) -> list[Path]:
    """Return the checkpoints of a run, the most recently written one first.

    ``last.ckpt`` comes before what it names.
    """
    return newest_first(Path(run_dir, "checkpoints"), "*.ckpt")


def newest_first(directory: Path, pattern: str) -> list[Path]:
    """Return the checkpoints of a directory, the most recently written one first."""
    found = [path for path in directory.glob(pattern) if path.exists()]
    return sorted(found, key=lambda path: (-path.stat().st_mtime_ns, path.name != LAST))


def last_checkpoint(run_dir: str | Path) -> Path | None:
    """Return the most recently written checkpoint of a run that looks usable, or None."""
    return next((one for one in newest_checkpoints(run_dir) if not damage(one)), None)


def damage(checkpoint: Path, *, reads_all: bool = False) -> str:
    """Return why a checkpoint cannot be used; empty if it can.

    Args:
        reads_all: Whether to compare the content, too, which takes as long as loading it.
    """
    is_whole = is_complete if checkpoint.is_dir() else zipfile.is_zipfile
    if not is_whole(checkpoint):
        return "it was not written to its end"
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return ""
    size = size_of(checkpoint)
    if size != manifest.size:
        return f"it has {size:,} bytes where {manifest.size:,} were written"
    if not manifest.is_finite:
        return "its weights are not finite"
    if reads_all and _sha256(checkpoint) != manifest.sha256:
        return "its content is not what was written"
    return ""


def read_checkpoint(path: Path, *, with_optimizers: bool = True) -> dict[str, Any]:
    """Return a checkpoint, with whole tensors in host memory or, where possible, on the disk."""
    if path.is_dir():
        return read_whole(path, with_optimizers=with_optimizers)
    saved: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return saved


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint; that of a sharded model without its tensors."""
    return read_others(path) if path.is_dir() else read_checkpoint(path)


def size_of(checkpoint: Path) -> int:
    """Return the size of a checkpoint in bytes, which may be a directory."""
    files = checkpoint.rglob("*") if checkpoint.is_dir() else [checkpoint]
    return sum(one.stat().st_size for one in files if one.is_file())


def _sha256(path: Path) -> str:
    """Return the hash of a file, or that of the names and hashes in a directory."""
    if path.is_dir():
        lines = (f"{one.name} {_sha256(one)}\n" for one in sorted(path.iterdir()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
