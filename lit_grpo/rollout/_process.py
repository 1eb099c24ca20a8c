"""A server's processes, as one thing that starts, ends and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_grpo.rollout import _guard

GRACE_SECONDS = 5.0
"""A server that was asked to end is killed after them."""
TAIL_LINES = 15


class ServerProcess:
    """A command under a guard, which ends all its processes when this one ends, SIGKILL included.

    Args:
        command: The program and its arguments.
        env: Variables on top of this process's own.
        log_path: Gets what it prints, after what is there.
        asker_scratch: A directory to remove where this process ends without having ended it.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        *,
        asker_scratch: Path | None = None,
    ) -> None:
        self.log_path = log_path
        scratch = tempfile.mkdtemp(prefix="lit-grpo-")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, _guard.__file__, str(GRACE_SECONDS), scratch]
        guard += [str(asker_scratch or ""), *command]
        with log_path.open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                guard,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"TMPDIR": scratch} | dict(env),
                start_new_session=True,
            )
        assert self._guard.stdout is not None
        line = self._guard.stdout.readline()
        if not line:
            with self._guard:  # has ended, and takes nothing away
                shutil.rmtree(scratch, ignore_errors=True)
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
        """The last lines that it printed."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])

    def end(self) -> None:
        """Ask it to end, kill what is left, return when nothing is."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard has ended with the server
            self._guard.stdin.write(b"end\n")  # forked processes may hold the pipe open
            self._guard.stdin.close()
        try:
            self._guard.wait(GRACE_SECONDS + 2 * _guard.KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        assert self._guard.stdout is not None
        self._guard.stdout.close()
        for process in _guard.members(self.pid):  # only where the guard itself was killed
            process.kill()
