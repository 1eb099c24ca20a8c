"""Let one process at a time train in a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_grpo.types import UserError

NAME = "run.lock"
FLOCK = "hhqqi4x"
"""``struct flock`` of Linux: type, whence, start, length, process."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory; the system releases it if the process is killed.

    Raises:
        UserError: another process holds it.
    """
    path = run_dir / NAME
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError:  # the run log, which is opened next, names the setting
        yield
        return
    with file:
        try:
            # Unlike flock's, this lock does not pass to processes that are forked.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise UserError(
                f"run_dir must be used by one training at a time, got {run_dir}, in which "
                f"{file.read() or 'another process'} trains (each would overwrite what the other "
                "writes). Wait until it has ended, or set another run_dir."
            ) from None
        except OSError:
            pass  # a file system without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def is_locked(run_dir: Path) -> bool:
    """Return whether a process trains in a run directory.

    It only asks: to take the lock for a moment would refuse a run that starts in that moment.
    """
    query = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with (run_dir / NAME).open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, query)
    except FileNotFoundError:
        return False
    except OSError:  # a file system without locks: only whether the file exists
        return True
    kind, *_ = struct.unpack(FLOCK, answer)
    return bool(kind != fcntl.F_UNLCK)
