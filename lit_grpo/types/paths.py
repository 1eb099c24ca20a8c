"""Read ``~`` at the start of a path: Python, YAML and ``--key=~/…`` leave it as it is."""

from __future__ import annotations

import os
import re
from pathlib import Path


def at_home(path: str | Path) -> str:
    """Return a path with the home directory in place of ``~/`` or ``~user/`` at its start.

    The ``~`` of an unknown user stays, and so does ``~`` alone, which is null in YAML.
    """
    text = os.fspath(path)
    return os.path.expanduser(text) if re.match(r"~[\w.-]*/", text) else text  # noqa: PTH111
