"""Run a command, and end all of its processes when it exits or when the parent process dies.

The parent process holds the other end of standard input: a line or EOF on it ends the command.
This file runs as a standalone script, so it imports nothing from the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS = 1.0
GRACE_POLL_SECONDS = 0.1
KILL_SECONDS = 10.0


def main() -> int:
    """Run and guard the command in the arguments.

    Arguments: a grace period in seconds, a directory to remove at the end, the command.
    """
    grace_seconds, scratch, *command = sys.argv[1:]
    existing = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.exists() else set()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the pipe ends the guard
    # SLURM may send it to all processes of a job to ask the run to stop. The server inherits this.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,  # standard output carries the process id only
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    print(server.pid, flush=True)
    parent = os.getppid()
    shared = _watch(server, lambda: _wait_for_stop() or os.getppid() != parent)
    end_session(server, float(grace_seconds), shared, existing)
    shutil.rmtree(scratch, ignore_errors=True)
    return server.returncode


def _wait_for_stop() -> bool:
    """Wait up to one poll interval; return whether a line or EOF asks the guard to stop."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(readable)


def _die_with_parent() -> None:
    """Make Linux kill the server's main process if the guard itself is killed."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_session(
    server: subprocess.Popen[bytes], grace_seconds: float, shared: set[Path], existing: set[Path]
) -> None:
    """Terminate the server, kill what is left of its session, and remove its shared memory.

    Args:
        shared: Shared memory that the session is known to use.
        existing: Shared memory that existed before the server; it is kept.
    """
    deadline = time.monotonic() + grace_seconds
    server.terminate()
    shared = shared | _watch(server, lambda: _wait_past(deadline))
    deadline = time.monotonic() + KILL_SECONDS
    while (left := session_processes(server.pid)) and time.monotonic() < deadline:
        signal_all(left, signal.SIGSTOP)  # so that none of them creates more shared memory
        shared |= shared_memory(server.pid)
        signal_all(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=1)
    server.wait()
    for path in shared - existing:
        path.unlink(missing_ok=True)


def _watch(server: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> set[Path]:
    """Wait until the server has exited or ``is_over``; return the shared memory seen until then.

    A server may create shared memory at any moment, even after it was told to exit.
    """
    shared: set[Path] = set()
    while server.poll() is None and not is_over():
        shared |= shared_memory(server.pid)
    return shared | shared_memory(server.pid)


def _wait_past(deadline: float) -> bool:
    """Wait one poll interval of the grace period; return whether the deadline has passed."""
    time.sleep(GRACE_POLL_SECONDS)
    return time.monotonic() > deadline


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def session_processes(session: int) -> list[psutil.Process]:
    """Return the living processes of a session, in all its process groups."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def shared_memory(session: int) -> set[Path]:
    """Return the files in /dev/shm that the session's processes have mapped.

    A killed process leaves them behind.

    Files in subdirectories are not counted: they may be a model's weights. Files are compared by
    inode, since a semaphore is mapped under a temporary name.
    """
    mapped = set()
    for process in session_processes(session):
        with contextlib.suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                _, _, _, _, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith(f"{SHARED_MEMORY}/"):
                    mapped.add(int(inode))
    return {path for path in SHARED_MEMORY.iterdir() if _inode(path) in mapped} if mapped else set()


def _inode(path: Path) -> int | None:
    with contextlib.suppress(OSError):  # it may just have been removed
        return path.stat().st_ino
    return None


if __name__ == "__main__":
    sys.exit(main())
