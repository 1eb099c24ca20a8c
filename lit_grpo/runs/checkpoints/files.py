"""Find, verify, read and remove the checkpoints of a run.

A checkpoint is a file, or a directory if its model is sharded; its manifest says what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from lit_grpo.distributed.checkpoints import is_complete, read_others, read_whole
from lit_grpo.runs.checkpoints.atomic_save import manifest_path
from lit_grpo.runs.files.event_log import now
from lit_grpo.types.atomic import partial_path, sync
from lit_grpo.types.paths import refuse_unreadable

BEST_FILE = "best.ckpt"
LAST = "last.ckpt"
"""A link to the checkpoint that was written last."""
SUMMARY = {"reward/mean": "reward", "val/accuracy": "accuracy", "sft/loss": "loss"}
"""Metric that every manifest has, where it was logged -> its short name."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Facts about a checkpoint, known without reading it: ``step_000120.ckpt.json``."""

    size: int
    """Size in bytes."""
    sha256: str
    is_finite: bool
    """Whether all weights are finite numbers."""
    rollout_step: int | None = None
    """Rollout steps that were finished (for SFT: batches)."""
    optimizer_step: int | None = None
    time: str = ""
    """When it was written, as ISO 8601."""
    chosen: str = ""
    """When a user chose to resume from it, rather than from later ones; empty if never."""
    trouble: str = ""
    """Trouble noticed by a callback that may make the run useless; empty for a healthy run."""
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


def write_manifest(manifest: Manifest, checkpoint: Path) -> None:
    """Write the manifest of a checkpoint, whole or not at all."""
    path = manifest_path(checkpoint)
    partial = partial_path(path)
    partial.write_text(json.dumps(asdict(manifest), indent=2))
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)  # the moves


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
    return sorted(found, key=lambda path: (*_when_written(path), path.name == LAST), reverse=True)


def _when_written(checkpoint: Path) -> tuple[float, int]:
    """Return when a checkpoint was written or chosen, and its step, by its manifest.

    The file's own time may be the time of a copy.
    """
    manifest = read_manifest(checkpoint)
    time = "" if manifest is None else manifest.chosen or manifest.time
    if manifest is None or not time:
        return checkpoint.stat().st_mtime, 0
    return datetime.fromisoformat(time).timestamp(), manifest.rollout_step or 0


def choose(checkpoint: Path) -> None:
    """Make a checkpoint count as the one written last, so that a run resumes from it."""
    manifest = read_manifest(checkpoint)
    if manifest is not None:
        write_manifest(replace(manifest, chosen=now("milliseconds")), checkpoint.resolve())
    os.utime(checkpoint)  # for one without a manifest
    link_last(checkpoint)


def last_checkpoint(run_dir: str | Path) -> Path | None:
    """Return the most recently written checkpoint of a run that looks usable, or None."""
    return next((one for one in newest_checkpoints(run_dir) if not why_unusable(one)), None)


def healthy_checkpoint(run_dir: str | Path) -> Path | None:
    """Return the most recently written checkpoint of a healthy run that looks usable, or None."""
    found = (one.with_name(one.resolve().name) for one in newest_checkpoints(run_dir))
    return next(
        (one for one in found if is_healthy(read_manifest(one)) and not why_unusable(one)), None
    )


def is_healthy(manifest: Manifest | None) -> bool:
    """Return whether a checkpoint is known to be from a healthy run."""
    return manifest is not None and manifest.is_healthy


def why_unusable(checkpoint: Path, *, reads_all: bool = False) -> str:
    """Return why a checkpoint cannot be used; empty if it can.

    Args:
        reads_all: Whether to compare the content as well, which takes as long as loading it.

    Raises:
        UserError: this user may not read it.
    """
    refuse_unreadable(checkpoint)
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
    if reads_all and sha256_of(checkpoint) != manifest.sha256:
        return "its content is not what was written"
    return ""


def read_checkpoint(path: Path, *, with_optimizers: bool = True) -> dict[str, Any]:
    """Return a checkpoint, with whole tensors in host memory or, where possible, on the disk."""
    if path.is_dir():
        return read_whole(path, with_optimizers=with_optimizers)
    saved: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return saved


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint; a sharded model's comes without its tensors."""
    return read_others(path) if path.is_dir() else read_checkpoint(path)


def size_of(checkpoint: Path) -> int:
    """Return the size in bytes of a checkpoint, a file or a directory."""
    files = checkpoint.rglob("*") if checkpoint.is_dir() else [checkpoint]
    return sum(one.stat().st_size for one in files if one.is_file())


def sha256_of(path: Path) -> str:
    """Return the hash of a file, or of the names and hashes in a directory."""
    if path.is_dir():
        lines = (f"{one.name} {sha256_of(one)}\n" for one in sorted(path.iterdir()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
