"""Runs a command and takes all of its processes away when it ends, or when whoever asked for it
is done: its standard input is a pipe whose other end the asker holds.

A program of its own, started by its path: it imports nothing of the package.
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

SHARED = Path("/dev/shm")
POLL_SECONDS = 1.0
GRACE_POLL_SECONDS = 0.1
KILL_SECONDS = 10.0


def main() -> int:
    """Arguments: seconds to end in, a directory to remove at the end, the command."""
    grace_seconds, scratch, *command = sys.argv[1:]
    others = set(SHARED.iterdir()) if SHARED.exists() else set()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the pipe says when to end
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,  # the asker reads no more than one line of ours
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    print(server.pid, flush=True)
    asker = os.getppid()
    shared = _watch(server, lambda: _is_asker_done() or os.getppid() != asker)
    end_session(server, float(grace_seconds), shared, others)
    shutil.rmtree(scratch, ignore_errors=True)
    return server.returncode


def _is_asker_done() -> bool:
    """Gone, or says so, within the time of one poll."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(readable)


def _die_with_parent() -> None:
    """Linux only: at least the main process goes when this one is killed."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_session(
    server: subprocess.Popen, grace_seconds: float, shared: set[Path], others: set[Path]
) -> None:
    """Ask the server to end, kill what is left of its session, and remove its shared memory, but
    for what others made before it."""
    deadline = time.monotonic() + grace_seconds
    server.terminate()
    shared = shared | _watch(server, lambda: _is_past(deadline))
    deadline = time.monotonic() + KILL_SECONDS
    while (left := members(server.pid)) and time.monotonic() < deadline:
        signal_all(left, signal.SIGSTOP)  # what stands still makes no more memory
        shared |= _shared_memory(server.pid)
        signal_all(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=1)
    server.wait()
    for path in shared - others:
        path.unlink(missing_ok=True)


def _watch(server: subprocess.Popen, is_over: Callable[[], bool]) -> set[Path]:
    """The shared memory that its session has had until it ended, or it was over: a server that is
    only starting makes some at any moment, whatever it has been asked."""
    shared: set[Path] = set()
    while server.poll() is None and not is_over():
        shared |= _shared_memory(server.pid)
    return shared | _shared_memory(server.pid)


def _is_past(deadline: float) -> bool:
    """Takes a moment."""
    time.sleep(GRACE_POLL_SECONDS)
    return time.monotonic() > deadline


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def members(session: int) -> list[psutil.Process]:
    """The living processes of a session, whatever group they are in."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _shared_memory(session: int) -> set[Path]:
    """What the session's processes have in /dev/shm: a killed process leaves it there. Files in
    folders there are somebody's, such as the weights of a model.

    By inode: whoever makes a semaphore has it mapped under a name that is gone.
    """
    mapped = set()
    for process in members(session):
        with contextlib.suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                _, _, _, _, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith(f"{SHARED}/"):
                    mapped.add(int(inode))
    return {path for path in SHARED.iterdir() if _inode(path) in mapped} if mapped else set()


def _inode(path: Path) -> int | None:
    with contextlib.suppress(OSError):  # gone meanwhile
        return path.stat().st_ino
    return None


if __name__ == "__main__":
    sys.exit(main())
