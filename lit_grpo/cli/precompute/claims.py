"""Claim votes for a process, so that no other process asks for them at the same time.

A claim is a lock on one byte of a file, which the system releases when the process ends in any way.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path


class Claims:
    """The claims of this process. Open it once: closing any descriptor of the file frees them all.

    On a file system without locks every claim is granted, so two processes may ask the same.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(directory / "claims", os.O_RDWR | os.O_CREAT, 0o644)
        self._taken: set[str] = set()

    def take(self, name: str) -> bool:
        """Claim a name; return False if this process or another one has it."""
        if name in self._taken:
            return False
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _lock_offset(name))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            pass
        self._taken.add(name)
        return True

    def release(self, name: str) -> None:
        self._taken.remove(name)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _lock_offset(name))
        except OSError:
            return

    def close(self) -> None:
        os.close(self._descriptor)


def _lock_offset(name: str) -> int:
    """Return the byte of a name, so far apart that two names hardly ever share one."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
