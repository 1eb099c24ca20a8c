"""Read, show and check paths that users give.

Python, YAML and ``--key=~/…`` leave a ``~`` at the start of a path as it is.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from lit_grpo.types.errors import UserError


def check_run_dir(run_dir: object) -> None:
    """Check that the directory of a run has a name: an empty string means the working directory.

    Raises:
        UserError: it has none.
    """
    if run_dir == "":
        raise UserError(
            "run_dir must be a directory, got an empty string (a variable of the shell that is not "
            "set?). Set run_dir."
        )


def refuse_unreadable(path: Path) -> None:
    """Check that this user may read a file, or list a directory; what is not there passes.

    Libraries take a file that may not be read for one that is damaged, or not there.

    Raises:
        UserError: the user may not.
    """
    mode = os.R_OK
    try:
        if not path.exists():
            return
        mode |= os.X_OK if path.is_dir() else 0
        may_read = os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)
    except PermissionError:  # of a directory above it
        may_read = False
    if not may_read:
        raise UserError(
            f"{path} may not be read by this user (permission denied). Ask its owner to make it "
            "readable, or run the command as its owner."
        )


def shown_path(path: Path) -> str:
    """Return a path for a message: relative if it lies below the working directory."""
    with suppress(OSError, ValueError):  # the directory is gone, or elsewhere
        return str(path.relative_to(Path.cwd()))
    return str(path)


def at_home(path: str | Path) -> str:
    """Return a path with the home directory in place of ``~/`` or ``~user/`` at its start.

    The ``~`` of an unknown user stays, and so does ``~`` alone, which is null in YAML.
    """
    text = os.fspath(path)
    return os.path.expanduser(text) if re.match(r"~[\w.-]*/", text) else text  # noqa: PTH111
