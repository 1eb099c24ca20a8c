"""Where the files of a run are: its directory, and the checkpoint to go on from.

Refuses what would overwrite another run. It writes no file itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lit_grpo.cli.configs import Invocation
from lit_grpo.runs.files import last_checkpoint, next_run_dir
from lit_grpo.types import UserError

TRAINING = ("sft", "fit")
"""The commands that write into a run directory."""
RUN_DIR_VARIABLE = "LIT_GRPO_RUN_DIR"
"""Tells the ranks that a trainer starts which directory rank 0 chose."""


@contextmanager
def choose_run_dir(command: str, invocation: Invocation) -> Iterator[str]:
    """Yields the run directory, chosen where none is given; one that stays empty is removed."""
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
            "run_dir must be set where ranks are started from outside (each would choose "
            "a directory of its own). Set run_dir."
        )
    return os.environ[RUN_DIR_VARIABLE]


def _latest_run_dir(runs: Path) -> Path:
    """The run with the highest number that has a checkpoint."""
    numbers = [
        int(path.name)
        for path in runs.glob("*")
        if path.name.isdecimal() and last_checkpoint(path) is not None
    ]
    if not numbers:
        raise UserError(f"{runs} has no run with a checkpoint to go on from. Set run_dir.")
    return runs / str(max(numbers))


def find_checkpoint(name: str, run_dir: Path) -> str:
    """The path of a checkpoint, where ``last`` stands for the last one of the run.

    Raises:
        ValueError: there is none.
    """
    path = last_checkpoint(run_dir) if name == "last" else name
    if path is None:
        raise UserError(
            f"{run_dir} has no checkpoint to go on from. Leave --ckpt_path out to start afresh."
        )
    if "://" not in str(path) and not Path(path).exists():
        raise UserError(f"{path}: no such checkpoint. Set ckpt_path to a file or to last.")
    return str(path)


def refuse_used(run_dir: Path) -> None:
    """Raises ValueError where another run has left what a fresh one would overwrite."""
    if (run_dir / "metrics.csv").exists() or any(run_dir.glob("checkpoints/*")):
        raise UserError(
            f"{run_dir} holds a run already, which a fresh one would overwrite. Give --ckpt_path "
            "last to go on with it, or another --run_dir."
        )
