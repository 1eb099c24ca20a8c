"""The ranks of runs, forked from a process that has imported everything: they start at once.

They are real processes that run ``lit-grpo``, as a launcher such as torchrun starts them: each with
its rank in the environment, and in a session of its own. ``python forked_ranks.py`` is the process
that they are forked from. It reads a request a line, and answers it with a number.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from lightning.fabric.plugins.environments.lightning import find_free_network_port
from processes import environment

STILL_RUNNING = -1000


@dataclass(frozen=True)
class Ranks:
    """The processes of one run, in the order of their ranks."""

    importer: Importer
    pids: Sequence[int]

    def wait(self, seconds: float = 240) -> list[int]:
        """Return the exit codes, negative after a signal, as `subprocess` has them."""
        end = time.monotonic() + seconds
        codes = [self.importer.ask(wait=one, seconds=end - time.monotonic()) for one in self.pids]
        assert STILL_RUNNING not in codes, f"exit codes {codes} after {seconds} s"
        return codes

    def are_running(self) -> bool:
        return all(self.importer.ask(wait=one, seconds=0) == STILL_RUNNING for one in self.pids)

    def kill(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


class Importer:
    """The process that has imported everything."""

    def __init__(self, process: Popen[str]) -> None:
        self._process = process

    def ask(self, **request: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    @contextmanager
    def running(
        self, words: Sequence[str], cwd: Path, *, num_ranks: int = 0, **variables: str
    ) -> Iterator[Ranks]:
        """Start ``lit-grpo`` in a process, or on so many ranks, and kill what is left at last.

        The process writes to ``said.txt``, rank n to ``said{n}.txt``.
        """
        ranks = range(num_ranks) if num_ranks else ("",)
        launcher = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_network_port()),
            "WORLD_SIZE": str(num_ranks),
        }
        pids = []
        for rank in ranks:
            env = {**launcher, "LOCAL_RANK": str(rank)} if num_ranks else {}
            said = str(cwd / f"said{rank}.txt")
            pids.append(self.ask(start=words, cwd=str(cwd), said=said, env=env | variables))
        started = Ranks(self, pids)
        try:
            yield started
        finally:
            started.kill()


@contextmanager
def imported(**variables: str) -> Iterator[Importer]:
    """Start the process that imports everything, and end it."""
    words, env = [sys.executable, __file__], environment(**variables)
    with Popen(words, env=env, stdin=PIPE, stdout=PIPE, text=True) as process:
        yield Importer(process)
        assert process.stdin is not None
        process.stdin.close()


def _serve() -> dict[str, Any]:
    """Answer requests; return only in a forked process, with the request that it is to fulfil."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = _wait(request["wait"], request["seconds"])
        elif not (answer := os.fork()):
            return request
        print(answer, flush=True)
    sys.exit()


_ended: dict[int, int] = {}


def _wait(pid: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while pid not in _ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            _ended[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > end:
            return STILL_RUNNING
        else:
            time.sleep(0.02)
    return _ended[pid]


def _become(request: Mapping[str, Any]) -> None:
    """Turn this process into one that a launcher might have started with these words."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), said, said)):
        os.dup2(file, stream)
    sys.argv = ["lit-grpo", *request["start"]]


if __name__ == "__main__":
    import holds  # noqa: F401 - with the trainer
    import transformers.models.llama.modeling_llama  # noqa: F401

    import lit_grpo.cli.app  # noqa: F401
    from lit_grpo.__main__ import main

    _become(_serve())
    sys.exit(main())
