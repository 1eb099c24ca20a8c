"""A temporary directory that is deleted even if the process that made it is killed."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path


class ScratchDirectory:
    """A new temporary directory; it is deleted by ``remove``, or when this process dies.

    A small shell process waits for the end of a pipe, so this works even after SIGKILL. Forked
    children hold the same pipe: the directory is kept until they have ended.
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # Delete on a line, or on EOF when this process has died.
        remover = ["sh", "-c", 'read -r _; rm -rf "$0"', str(self.path)]
        self._remover = subprocess.Popen(remover, stdin=subprocess.PIPE, start_new_session=True)

    def remove(self) -> None:
        """Delete the directory, and return when it is gone."""
        self._remover.communicate(b"\n")

    def keep(self) -> None:
        """Keep the directory, also after this process has ended."""
        self._remover.kill()
        self._remover.communicate()
