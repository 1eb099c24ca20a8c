"""Write a directory so that others see it whole or not at all, whenever the process is killed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lit_grpo.types import UserError

PARTIAL, EARLIER = ".partial", ".earlier"
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux's ``renameat2``."""


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yield an empty directory to write into; complete, it takes the place of the old one.

    Until then it is ``NAME.partial``. An error in the block removes it; after a kill the next call
    does. Where a file system cannot exchange two directories in one move, the old one is
    ``NAME.earlier`` for a moment, and after a kill just then the next call puts it back. Processes
    that write into the same parent directory wait for each other.

    Raises:
        UserError: the disk is full.
    """
    partial, earlier = (Path(f"{directory}{suffix}") for suffix in (PARTIAL, EARLIER))
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(directory.parent):
        if earlier.exists() and not directory.exists():
            earlier.rename(directory)
        for left in (partial, earlier):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            _flush(partial)
            _move(partial, directory, earlier)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"{directory} cannot be written: the disk is full, and what was there has not "
                "changed. Free some space, or choose another place."
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _move(partial: Path, directory: Path, earlier: Path) -> None:
    if not directory.exists():
        partial.rename(directory)
    elif not _exchange(partial, directory):
        directory.rename(earlier)
        partial.rename(directory)
        shutil.rmtree(earlier)
    sync(directory.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one move; return False where the system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return bool(
        rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0
    )


def _flush(directory: Path) -> None:
    """Wait until all files of a directory are on the disk."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def sync(path: Path) -> None:
    """Wait until a file or the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which the system releases when the process ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
