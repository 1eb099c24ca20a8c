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
from pathlib import Path

import psutil

POLL_SECONDS = 1.0
KILL_SECONDS = 10.0


def main() -> int:
    """Arguments: seconds to end in, a directory to remove at the end, one to remove where the
    asker is gone by then (may be empty), the command."""
    grace_seconds, scratch, asker_scratch, *command = sys.argv[1:]
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
    asker, shared = os.getppid(), set()
    while server.poll() is None and os.getppid() == asker and not _is_asker_done():
        shared |= _shared_memory(server.pid)
    end_session(server, float(grace_seconds), shared)
    shutil.rmtree(scratch, ignore_errors=True)
    if asker_scratch and os.getppid() != asker:
        shutil.rmtree(asker_scratch, ignore_errors=True)
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


def end_session(server: subprocess.Popen, grace_seconds: float, shared: set[Path]) -> None:
    """Ask the server to end, kill what is left of its session, and remove its shared memory."""
    shared = shared | _shared_memory(server.pid)
    if server.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace_seconds)
    deadline = time.monotonic() + KILL_SECONDS
    while (left := members(server.pid)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)
    server.wait()
    for path in shared:
        path.unlink(missing_ok=True)


def members(session: int) -> list[psutil.Process]:
    """The living processes of a session, whatever group they are in."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _shared_memory(session: int) -> set[Path]:
    """What the session's processes have in /dev/shm: a killed process leaves it there."""
    found = set()
    for process in members(session):
        with contextlib.suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = line[line.find("/") :]
                if path.startswith("/dev/shm/") and not path.endswith(" (deleted)"):
                    found.add(Path(path))
    return found


if __name__ == "__main__":
    sys.exit(main())
