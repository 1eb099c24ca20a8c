"""A temporary directory that goes with the process that made it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path


class ScratchDirectory:
    """A new directory that is gone when this process and what it forked are, SIGKILL included."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # A line, or nobody left who could write one: either way it is time.
        remover = ["sh", "-c", 'read -r _; rm -rf "$0"', str(self.path)]
        self._remover = subprocess.Popen(remover, stdin=subprocess.PIPE, start_new_session=True)

    def remove(self) -> None:
        """Returns when it is gone."""
        self._remover.communicate(b"\n")

    def keep(self) -> None:
        """It stays, whatever becomes of this process."""
        self._remover.kill()
        self._remover.communicate()
