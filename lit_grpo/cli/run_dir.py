"""Choose the directory of a run: the given one, the next free number, or that of the latest run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lit_grpo.cli.commands import TRAINING
from lit_grpo.cli.configs import Invocation
from lit_grpo.runs.files import last_checkpoint, next_run_dir
from lit_grpo.types import UserError

RUN_DIR_VARIABLE = "LIT_GRPO_RUN_DIR"
"""Environment variable with the directory that rank 0 chose, for the ranks that it launches."""


@contextmanager
def choose_run_dir(command: str, invocation: Invocation) -> Iterator[str]:
    """Yield the given run directory or a new one; remove the new one if it stays empty."""
    if invocation.run_dir is not None:
        yield invocation.run_dir
    elif "LOCAL_RANK" in os.environ:
        yield _inherited_run_dir()
    else:
        run_dir = _new_or_latest(command, invocation)
        os.environ[RUN_DIR_VARIABLE] = str(run_dir)
        try:
            yield str(run_dir)
        finally:
            with suppress(OSError):
                os.removedirs(run_dir)


def _new_or_latest(command: str, invocation: Invocation) -> Path:
    runs = Path("runs") / (invocation.name or command)
    if invocation.ckpt_path == "last":
        return _latest_run_dir(runs)
    return next_run_dir(runs.parent, runs.name) if command in TRAINING else runs


def _inherited_run_dir() -> str:
    if RUN_DIR_VARIABLE not in os.environ:
        raise UserError(
            "run_dir must be set if a launcher starts the ranks (each would choose a different "
            "directory). Set run_dir."
        )
    return os.environ[RUN_DIR_VARIABLE]


def _latest_run_dir(runs: Path) -> Path:
    """Return the run with the highest number among those with a checkpoint."""
    numbers = [
        int(path.name)
        for path in runs.glob("*")
        if path.name.isdecimal() and last_checkpoint(path) is not None
    ]
    if not numbers:
        raise UserError(f"{runs} has no run with a checkpoint to resume from. Set run_dir.")
    return runs / str(max(numbers))
