"""``lit-grpo`` or a script, and ranks that are forked where Lightning would start interpreters.

The ranks are forked before anything else happens, and wait until the first one starts them: each
is a child of it, with nothing but the words and the environment that it is started with.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from subprocess import TimeoutExpired
from types import SimpleNamespace
from typing import Any, NoReturn

from lightning.pytorch.strategies.launchers import subprocess_script

from lit_grpo.__main__ import main as lit_grpo


class Child:
    """A forked process, with what launchers use of a ``Popen``."""

    def __init__(self, pid: int) -> None:
        self.returncode: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutExpired("a forked process", timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WaitingRank(Child):
    """A process that does nothing before it gets its environment."""

    def __init__(self) -> None:
        reads, self._writes = os.pipe()
        super().__init__(os.fork())
        if self.pid:
            os.close(reads)
        else:
            os.close(self._writes)
            _wait_for_environment(reads)

    def start(self, env: Mapping[str, str]) -> WaitingRank:
        with os.fdopen(self._writes, "w") as writer:
            print(json.dumps(dict(env)), file=writer)
        return self


def _wait_for_environment(reads: int) -> None:
    with os.fdopen(reads) as reader:
        given = reader.readline()  # a later rank may hold the other end, too
    if not given:  # the first rank has ended without starting others
        os._exit(0)
    os.environ.clear()
    os.environ.update(json.loads(given))


def main() -> Any:
    """Run the arguments ``NUM_RANKS SCRIPT.py WORD...`` or ``NUM_RANKS WORD...`` of lit-grpo."""
    num_ranks, *words = sys.argv[1:]
    waiting: list[WaitingRank] = []
    for _ in range(1, int(num_ranks)):
        waiting.append(rank := WaitingRank())
        if not rank.pid:
            return run(words)

    def start(command: Sequence[str], env: Mapping[str, str], cwd: None) -> WaitingRank:
        return waiting.pop(0).start(env)

    subprocess_script.subprocess = SimpleNamespace(Popen=start)  # type: ignore[attr-defined]
    return run(words)


def run(words: Sequence[str]) -> Any:
    if not words[0].endswith(".py"):
        sys.argv = ["lit-grpo", *words]
        return lit_grpo()
    sys.argv = [*words]
    runpy.run_path(words[0], run_name="__main__")
    return 0


def become_lit_grpo(words: Sequence[str]) -> NoReturn:
    """Run ``lit-grpo`` in a forked process, and end it as an interpreter would."""
    exit_code = 1
    try:
        sys.argv = ["lit-grpo", *words]
        exit_code = lit_grpo()
    except SystemExit as leave:
        exit_code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
