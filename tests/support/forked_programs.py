"""Programs that are forked from a process which has imported everything: they start at once.

Unlike a fork of the test's own process, one of these has no threads, no handlers of signals and no
modules of the tests, as a program that was started by a shell.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import TimeoutExpired

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["lit_grpo.cli.app", "lit_grpo.callbacks"])


class LitGRPO:
    """A run of ``lit-grpo`` in a process group of its own, with the methods of a ``Popen``."""

    def __init__(
        self, words: list[str], directory: Path, environment: Mapping[str, str], said: Path
    ) -> None:
        self._process = SERVER.Process(target=_run, args=(words, directory, environment, said))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise TimeoutExpired("lit-grpo", seconds)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def _run(words: list[str], directory: Path, environment: Mapping[str, str], said: Path) -> None:
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    from lit_grpo.__main__ import main

    torch.set_num_threads(1)
    sys.exit(main(words))
