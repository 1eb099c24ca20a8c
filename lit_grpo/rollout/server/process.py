"""A server's processes, as one thing that starts, ends and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from lit_grpo.rollout.server import guard as server_guard

GRACE_SECONDS = 5.0
"""A server that was asked to end is killed after them."""
TAIL_LINES = 15
ERROR_LINES = 6


class ServerProcess:
    """A command under a guard, which ends all its processes when this one ends, SIGKILL included.

    Args:
        command: The program and its arguments.
        env: Variables on top of this process's own.
        log_path: Gets what it prints, after what is there.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.log_path = log_path
        self._scratch = tempfile.mkdtemp(prefix="lit-grpo-")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, server_guard.__file__, str(GRACE_SECONDS), self._scratch, *command]
        with log_path.open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                guard,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"TMPDIR": self._scratch} | dict(env),
                start_new_session=True,
            )
        assert self._guard.stdout is not None
        line = self._guard.stdout.readline()
        if not line:
            with self._guard:  # has ended, and takes nothing away
                shutil.rmtree(self._scratch, ignore_errors=True)
            raise FileNotFoundError(
                f"{command[0]!r} could not be started: {self.log_tail(1)} (it is the server's "
                "interpreter or program). Set model.engine.init_args.launch.python or .program."
            )
        self.pid = int(line)
        """Of the server's main process, which leads a session of its own."""

    @property
    def is_running(self) -> bool:
        return self._guard.poll() is None

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """The last lines that it printed, after the errors before them: what servers print when
        they go down often fills more than a tail."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        errors = _errors(lines[:-num_lines])
        return "\n".join(errors + ["..."] * bool(errors) + lines[-num_lines:])

    def end(self) -> None:
        """Ask it to end, kill what is left, return when nothing is."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard has ended with the server
            self._guard.stdin.write(b"end\n")  # forked processes may hold the pipe open
            self._guard.stdin.close()
        try:
            self._guard.wait(GRACE_SECONDS + 2 * server_guard.KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        assert self._guard.stdout is not None
        self._guard.stdout.close()
        if left := server_guard.members(self.pid):  # the guard itself was killed
            server_guard.signal_all(left, signal.SIGKILL)
            psutil.wait_procs(left, server_guard.KILL_SECONDS)
        shutil.rmtree(self._scratch, ignore_errors=True)


def _errors(lines: Sequence[str]) -> list[str]:
    """The last lines that name an exception, each once, in the order in which they came."""
    first: dict[str, str] = {}
    for line in lines:
        if match := re.search(r"\b\w*(Error|Exception)\b: .*", line):
            first.setdefault(match[0], line)
    return list(first.values())[-ERROR_LINES:]
