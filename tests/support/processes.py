"""Run programs in process groups of their own, each of which ends as a whole."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen, run
from typing import Any

LIT_GRPO = [sys.executable, "-m", "lit_grpo"]
ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def environment(**variables: str) -> dict[str, str]:
    """Return the variables of a process; a PYTHONPATH comes before that of the environment."""
    if variables.get("PYTHONPATH") and (inherited := os.environ.get("PYTHONPATH")):
        variables["PYTHONPATH"] += os.pathsep + inherited
    return os.environ | ENV | variables


def start(
    words: Sequence[str], cwd: Path | None = None, *, said: Path | None = None, **variables: str
) -> Popen[str]:
    """Start a command; its output goes to the file ``said``, by default to pipes."""
    with said.open("w") if said else nullcontext(PIPE) as output:
        return Popen(
            words,
            cwd=cwd,
            env=environment(**variables),
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )


@contextmanager
def running(
    words: Sequence[str], cwd: Path | None = None, *, said: Path | None = None, **variables: str
) -> Iterator[Popen[str]]:
    """Start a command, and kill what is left of its process group in the end."""
    with start(words, cwd, said=said, **variables) as process:
        try:
            yield process
        finally:
            kill_group(process)


def kill_group(process: Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def can_run(command: Sequence[str]) -> bool:
    return shutil.which(command[0]) is not None and run(command).returncode == 0


def run_program(
    words: Sequence[str],
    cwd: Path | None = None,
    *,
    exit_code: int = 0,
    seconds: float = 500,
    **variables: str,
) -> CompletedProcess[str]:
    """Run a command to its end; if it ends otherwise than expected, show its output."""
    with running(words, cwd, **variables) as process:
        stdout, stderr = process.communicate(timeout=seconds)
    assert process.returncode == exit_code, stdout + stderr
    return CompletedProcess(words, exit_code, stdout, stderr)
