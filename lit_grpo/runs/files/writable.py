"""Check that files can be written to a place."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from lit_grpo.types import UserError


def check_writable(option: str, path: str | Path, directory: Path) -> None:
    """Check, before long work, that files can be written into a directory, which need not exist.

    Args:
        option: What sets it, such as ``--out``.
        path: What it was set to.
        directory: Where files will be written.

    Raises:
        UserError: they cannot.
    """
    try:
        try_writing(directory)
    except OSError as error:
        name = option.removeprefix("--")
        raise UserError(
            f"{name} must be a place that can be written, got {path} ({error.filename}: "
            f"{error.strerror}). Set {option}."
        ) from error


def try_writing(directory: Path) -> None:
    """Write a file into a directory or, if it does not exist yet, the nearest one above it.

    Raises:
        OSError: that fails, or one of them is not a directory; it names which.
    """
    place = nearest(directory)
    if not place.is_dir():
        number = errno.EEXIST if place == directory.absolute() else errno.ENOTDIR
        raise OSError(number, os.strerror(number), str(place))
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        error.filename = str(place)
        raise


def nearest(path: Path) -> Path:
    """Return the path, or the nearest one above it that exists."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if os.path.lexists(one))
