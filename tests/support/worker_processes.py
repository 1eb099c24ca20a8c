"""Find the worker processes of a trainer, and whether processes live, in /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def guards_of(trainer: int) -> set[int]:
    """Return the process ids of the guards that the trainer started, one per worker."""
    return {pid for pid, parent in _worker_processes().items() if parent == trainer}


def workers_of(trainer: int) -> set[int]:
    """Return the process ids of the workers of a trainer."""
    found = _worker_processes()
    return {pid for pid, parent in found.items() if found.get(parent) == trainer}


def _worker_processes() -> dict[int, int]:
    """Return the parents of all processes that run the worker's file, by process id."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            command = (status.parent / "cmdline").read_text()
            parent = status.read_text().split("PPid:\t")[1].split("\n")[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "rewards/workers/worker.py" in command:
            found[int(status.parent.name)] = int(parent)
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def lives_in_session(pid: int, leader: int) -> bool:
    try:
        return os.getsid(pid) == leader and is_alive(pid)
    except ProcessLookupError:
        return False


def has_ended(leader: int) -> bool:
    """Return whether no process of a session is left."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return not any(lives_in_session(pid, leader) for pid in pids)


def is_busy(pid: int) -> bool:
    """Return whether a process has computed for half a second since the first call."""
    ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    return ticks - _first_ticks.setdefault(pid, ticks) > 0.5 * os.sysconf("SC_CLK_TCK")


_first_ticks: dict[int, int] = {}


def is_pending(pid: int, signum: int) -> bool:
    """Return whether a process has been sent a signal that has not reached it."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [line.split()[1] for line in status.splitlines() if line[:6] in ("SigPnd", "ShdPnd")]
    return any(int(mask, 16) & 1 << signum - 1 for mask in masks)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.02)
