"""Start and stop the processes of a launched server, and leave none behind."""

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
from lit_grpo.rollout.server.api_key import HIDDEN

GRACE_SECONDS = 5.0
"""Time a server has to exit after SIGTERM before it is killed."""
TAIL_LINES = 15
MAX_ERROR_LINES = 6


class ServerProcess:
    """A command under a guard process, which ends it when this process dies, even by SIGKILL.

    Args:
        command: The program and its arguments.
        env: Environment variables in addition to this process's.
        log_path: File to which its output is appended. Only this user can read it: SGLang's has
            its arguments.
        secret: Text to hide in what ``log_tail`` returns.

    Raises:
        FileNotFoundError: the program could not be started.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log_path: Path, secret: str = ""
    ) -> None:
        self.log_path = log_path
        self._secret = secret
        self._scratch = tempfile.mkdtemp(prefix="lit-grpo-")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, server_guard.__file__, str(GRACE_SECONDS), self._scratch, *command]
        log_path.touch(mode=0o600)
        log_path.chmod(0o600)
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
            with self._guard:
                shutil.rmtree(self._scratch, ignore_errors=True)
            raise FileNotFoundError(
                f"{command[0]!r} could not be started: {self.log_tail(1)} (it is the server's "
                "interpreter or program). Set model.engine.init_args.launch.python or .program."
            )
        self.pid = int(line)
        """Process id of the server's main process, which leads its own session."""

    @property
    def is_running(self) -> bool:
        return self._guard.poll() is None

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """Return the last lines of the output, preceded by earlier lines that name an error.

        A server that shuts down often prints more than a tail after the error that caused it.
        """
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        lines = (text.replace(self._secret, HIDDEN) if self._secret else text).splitlines()
        errors = _error_lines(lines[:-num_lines])
        first = [*errors, "..."] if errors else []
        return "\n".join(first + lines[-num_lines:])

    def stop(self) -> None:
        """Terminate the server, kill what is left after a grace period, and wait for it."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard has exited with the server
            # Closing is not enough: forked processes may hold the pipe open.
            self._guard.stdin.write(b"stop\n")
            self._guard.stdin.close()
        try:
            self._guard.wait(GRACE_SECONDS + 2 * server_guard.KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        assert self._guard.stdout is not None
        self._guard.stdout.close()
        if left := server_guard.session_processes(self.pid):  # if the guard was killed
            server_guard.signal_all(left, signal.SIGKILL)
            psutil.wait_procs(left, server_guard.KILL_SECONDS)
        shutil.rmtree(self._scratch, ignore_errors=True)


def _error_lines(lines: Sequence[str]) -> list[str]:
    """Return the last lines that name an exception, in order and without repetitions."""
    first: dict[str, str] = {}
    for line in lines:
        if match := re.search(r"\b\w*(Error|Exception)\b: .*", line):
            first.setdefault(match[0], line)
    return list(first.values())[-MAX_ERROR_LINES:]
