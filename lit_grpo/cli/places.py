"""Check that files can be written to a place, before the work whose result they hold."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lit_grpo.types import UserError


def check_place(option: str, path: str | Path, directory: Path) -> None:
    """Check that files can be written into a directory, which need not exist yet.

    Args:
        option: What sets it, such as ``--out``.
        path: What it was set to.
        directory: Where files will be written.

    Raises:
        UserError: they cannot.
    """
    directory = directory.absolute()
    place = next(one for one in (directory, *directory.parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        name = option.removeprefix("--")
        raise UserError(
            f"{name} must be a place that can be written, got {path} ({place}: "
            f"{error.strerror}). Set {option}."
        ) from error
