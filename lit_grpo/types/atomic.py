"""Write a directory or file so that others see it whole or not at all, even after a kill."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

log = logging.getLogger(__name__)

PARTIAL, EARLIER = ".partial", ".earlier"
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux's ``renameat2``."""


def partial_path(path: Path) -> Path:
    return path.with_name(f"{path.name}{PARTIAL}")


def earlier_path(path: Path) -> Path:
    return path.with_name(f"{path.name}{EARLIER}")


def numbered_path(path: Path) -> Path:
    """Return the first free name to keep what a path holds: ``config.0.yaml``, ``final.0``."""
    names = (f"{path.stem}.{number}{path.suffix}" for number in count())
    return next(one for one in map(path.with_name, names) if not one.exists())


@contextmanager
def replacing(directory: Path, *, is_durable: bool = True) -> Iterator[Path]:
    """Yield an empty directory to write into; complete, it takes the place of the old one.

    Until then it is ``NAME.partial``. An error in the block removes it; after a kill the next call
    does. Where a file system cannot exchange two directories in one move, the old one is
    ``NAME.earlier`` for a moment, and after a kill just then the next call puts it back. Processes
    that write into the same parent directory wait for each other.

    Args:
        is_durable: Wait until all is on the disk, so that a crash of the machine leaves one of the
            two as well.
    """
    directory = directory.absolute()
    partial, earlier = partial_path(directory), earlier_path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(directory.parent):
        put_back(directory)
        for left in (partial, earlier):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            if is_durable:
                sync_files(partial)
            _move(partial, directory, earlier)
            if is_durable:
                sync(directory.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to, which then takes the place of the old one in one move.

    An error in the block removes what was written, and leaves the old file.
    """
    partial = partial_path(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def put_back(directory: Path) -> None:
    """Put back what a killed process has moved away, unless there is something in its place."""
    earlier = earlier_path(directory)
    if earlier.exists() and not directory.exists():
        log.warning(
            "%s was being replaced when its process ended: what it had before is back", directory
        )
        os.replace(earlier, directory)


def _move(partial: Path, directory: Path, earlier: Path) -> None:
    if not directory.exists():
        partial.rename(directory)
    elif not _exchange(partial, directory):
        directory.rename(earlier)
        partial.rename(directory)
        shutil.rmtree(earlier)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one move; return False where the system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return bool(
        rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0
    )


def sync_files(directory: Path) -> None:
    """Wait until all files of a directory, and their names, are on the disk."""
    for path in (*directory.rglob("*"), directory):
        with suppress(FileNotFoundError):  # another rank's temporary one
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
