"""Move the files of a checkpoint into place, and clean up after processes that were killed.

A checkpoint is written as ``NAME.partial``. A directory and its manifest cannot be replaced in one
move, so those that were there are ``NAME.earlier`` meanwhile. One process at a time writes into a
directory. Files left by killed processes are restored or removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from lit_grpo.types.atomic import EARLIER, earlier_path, put_back

log = logging.getLogger(__name__)

LOCK = ".saving"
"""Lock file held by the process that is writing a checkpoint."""
LEFTOVER = re.compile(r"\.ckpt(\.json)?\.partial$|\.ckpt\.earlier(\.json)?$")
SAVE_WAIT_SECONDS = 60.0
"""How long a save waits for another process, which only looks at what was left."""
RESUME_WAIT_SECONDS = 10.0


def manifest_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.json")


@contextmanager
def saving(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory while a checkpoint is written into it, clean to begin with."""
    with _locked(directory, SAVE_WAIT_SECONDS) as is_alone:
        if is_alone:
            _clean_up(directory)
        yield


def clean_up_killed_saves(directory: Path) -> None:
    """Put back or remove what killed processes have left, unless another one is just saving."""
    if not (find_leftovers(directory) or (directory / LOCK).exists()):
        return
    with _locked(directory, RESUME_WAIT_SECONDS) as is_alone:
        if is_alone:
            _clean_up(directory)


def find_leftovers(directory: Path) -> list[Path]:
    """Return the files and directories of unfinished saves, including one that is running."""
    found = (path for path in directory.glob("*.ckpt.*") if LEFTOVER.search(path.name))
    return sorted(path for path in found if not path.is_symlink())


def is_saving(directory: Path) -> bool:
    """Return whether a process writes a checkpoint into a directory, or looks at what was left."""
    if not (directory / LOCK).exists():
        return False
    with _locked(directory, 0.0) as is_alone:
        return not is_alone


def replace_directory(partial: Path, target: Path) -> None:
    """Move a complete directory to its place; `forget_earlier` must follow.

    A kill at any moment leaves the old one, at its place or as ``NAME.earlier``, or the new one at
    its place. The manifest goes with the directory that it describes.
    """
    earlier = earlier_path(target)
    forget_earlier(target)
    if target.exists():
        with suppress(FileNotFoundError):
            os.replace(manifest_path(target), manifest_path(earlier))
        os.replace(target, earlier)
    os.replace(partial, target)


def forget_earlier(target: Path) -> None:
    """Remove what a directory has replaced, its manifest first: alone it would be put back."""
    earlier = earlier_path(target)
    manifest_path(earlier).unlink(missing_ok=True)
    shutil.rmtree(earlier, ignore_errors=True)


def _clean_up(directory: Path) -> None:
    """Put back directories that were being replaced, and remove all else that was left."""
    with suppress(OSError):  # of a directory that may only be read
        for earlier in directory.glob(f"*.ckpt{EARLIER}"):
            put_back(earlier.with_suffix(""))
        for manifest in directory.glob(f"*.ckpt{EARLIER}.json"):
            _put_back_manifest(manifest)
        for path in find_leftovers(directory):
            log.info("removing %s, which a save that did not end has left", path)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _put_back_manifest(manifest: Path) -> None:
    """Move the manifest of a directory that is back at its place, or has never left it."""
    earlier = manifest.with_suffix("")
    target = earlier.with_suffix("")
    if target.exists() and not earlier.exists() and not manifest_path(target).exists():
        os.replace(manifest, manifest_path(target))


@contextmanager
def _locked(directory: Path, seconds: float) -> Iterator[bool]:
    """Wait for the lock of a directory, and yield whether it is held; never on some file systems.

    The system releases it if the process is killed. Like a run's lock, it does not pass to
    processes that are forked.
    """
    deadline = time.monotonic() + seconds
    file = None
    while file is None and directory.is_dir():
        try:
            file = _try_lock(directory / LOCK)
        except BlockingIOError:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        except OSError:  # a file system without locks, or one that may only be read
            break
    try:
        yield file is not None
    finally:
        if file is not None:
            (directory / LOCK).unlink(missing_ok=True)
            file.close()


def _try_lock(path: Path) -> TextIO | None:
    """Return the locked file, or None if it was removed meanwhile.

    Raises:
        BlockingIOError: another process holds it.
    """
    file = path.open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except BaseException as error:
        file.close()
        if isinstance(error, PermissionError):  # the same, on some systems
            raise BlockingIOError from error
        raise
    file.close()
    return None
