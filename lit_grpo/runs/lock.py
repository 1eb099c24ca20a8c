"""Let one process at a time train in a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_grpo.types import UserError


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory; the system releases it if the process is killed.

    Raises:
        UserError: another process holds it.
    """
    path = run_dir / "run.lock"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError:  # the run log, which is opened next, names the setting
        yield
        return
    with file:
        try:
            # Unlike that of flock, this lock does not pass to processes that are forked.
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
