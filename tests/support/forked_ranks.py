"""The ranks of runs, forked from a process that has imported everything: they start at once.

They are real processes that run ``lit-grpo`` or a program of the tests, as a launcher such as
torchrun starts them: each with its rank in the environment, and in a session of its own. ``python
forked_ranks.py`` is the process that they are forked from. It reads a request a line, and answers
it with a number.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from paths import ROOT, SUPPORT
from processes import environment

STILL_RUNNING = -1000
LIT_GRPO = "lit_grpo.__main__"
PROGRAMS = [
    LIT_GRPO,
    "sharded_trainings",
    "preset_trainings",
    "chunked_trainings",
    "ddp_trainings",
    "small_optimizer_trainings",
    "forked_program",
    "forked_recipe",
    "forked_torchrun",
]
"""Modules whose function ``main`` can be run."""
OTHERS = [
    "lit_grpo.cli.app",
    "lit_grpo.callbacks",
    "transformers.models.llama.modeling_llama",
    "held_writing",
    "holds",
    "pyarrow.dataset",
    *(["deepspeed", "torch._inductor.compile_fx", "setuptools"] if find_spec("deepspeed") else []),
]
"""Modules that are imported as well. DeepSpeed imports the last two, which takes a second, when a
training begins."""


@dataclass(frozen=True)
class Forked:
    """A process, the leader of its session, with methods of a ``Popen``."""

    importer: Importer
    pid: int

    def poll(self) -> int | None:
        code = self.importer.ask(wait=self.pid, seconds=0)
        return None if code == STILL_RUNNING else code

    def wait(self, timeout: float = 240) -> int:
        """Return the exit code, negative after a signal."""
        code = self.importer.ask(wait=self.pid, seconds=timeout)
        if code == STILL_RUNNING:
            raise TimeoutExpired("a forked process", timeout)
        return code

    def send_signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)

    def kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Ranks:
    """The processes of one run, in the order of their ranks."""

    processes: Sequence[Forked]

    @property
    def pids(self) -> list[int]:
        return [one.pid for one in self.processes]

    def wait(self, seconds: float = 240) -> list[int]:
        """Return the exit codes, negative after a signal."""
        end = time.monotonic() + seconds
        return [one.wait(end - time.monotonic()) for one in self.processes]

    def are_running(self) -> bool:
        return all(one.poll() is None for one in self.processes)

    def kill(self) -> None:
        for one in self.processes:
            one.kill_group()


class Importer:
    """The process that has imported everything."""

    def __init__(self, process: Popen[str]) -> None:
        self._process = process

    def ask(self, **request: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(
        self,
        words: Sequence[str],
        cwd: Path,
        said: Path,
        *,
        program: str = LIT_GRPO,
        is_new: bool = True,
        **variables: str,
    ) -> Forked:
        """Start a program, whose output goes to the file ``said``, which is new or goes on."""
        request = {"start": words, "cwd": str(cwd), "said": str(said), "program": program}
        return Forked(self, self.ask(**request, is_new=is_new, env=variables))

    @contextmanager
    def running(
        self,
        words: Sequence[str],
        cwd: Path,
        *,
        num_ranks: int = 0,
        program: str = LIT_GRPO,
        **variables: str,
    ) -> Iterator[Ranks]:
        """Start a program in a process, or on so many ranks, and kill what is left at last.

        The process writes to ``said.txt``, rank n to ``said{n}.txt``.
        """
        launcher = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(num_ranks),
        }
        started = []
        for rank in range(num_ranks) if num_ranks else ("",):
            env = launcher | {"LOCAL_RANK": str(rank)} if num_ranks else {}
            said = cwd / f"said{rank}.txt"
            started.append(self.start(words, cwd, said, program=program, **env | variables))
        try:
            yield Ranks(started)
        finally:
            Ranks(started).kill()

    def run(
        self, words: Sequence[str], cwd: Path, *, seconds: float = 240, **settings: Any
    ) -> None:
        """Run a program as `running` does, to its end."""
        with self.running(words, cwd, **settings) as ranks:
            codes = ranks.wait(seconds)
        said = "".join(one.read_text() for one in sorted(cwd.glob("said*")))
        assert not any(codes), f"{said}\nexit codes {codes}"


@contextmanager
def imported() -> Iterator[Importer]:
    """Start the process that imports everything, and end it."""
    path = os.pathsep.join(map(str, (SUPPORT, ROOT / "scripts")))
    words, env = [sys.executable, __file__], environment(PYTHONPATH=path, DS_ACCELERATOR="cpu")
    env.pop("COLUMNS", None)  # a terminal knows its width
    with Popen(words, env=env, stdin=PIPE, stdout=PIPE, text=True) as process:
        yield Importer(process)
        assert process.stdin is not None
        process.stdin.close()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


def _serve() -> str:
    """Answer requests; return only in a forked process, the program that it is to run."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = _wait(request["wait"], request["seconds"])
        elif not (answer := _fork(request)):
            return str(request["program"])
        print(answer, flush=True)
    sys.exit()


def _fork(request: Mapping[str, Any]) -> int:
    """Return the new process once it is as requested; in it return 0."""
    is_ready, ready = os.pipe()
    if pid := os.fork():
        os.close(ready)
        os.read(is_ready, 1)
    else:
        _become(request)
        os.close(ready)
    os.close(is_ready)
    return pid


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
    tempfile.tempdir = None  # that of the environment, not of what was imported
    beginning = os.O_TRUNC if request["is_new"] else os.O_APPEND
    said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | beginning)
    for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), said, said)):
        os.dup2(file, stream)
    sys.argv = ["lit-grpo", *request["start"]]


if __name__ == "__main__":
    for name in (*OTHERS, *PROGRAMS):
        importlib.import_module(name)
    gc.freeze()  # so that a collection in a forked process does not look at all that is imported
    program = _serve()
    sys.exit(importlib.import_module(program).main())
