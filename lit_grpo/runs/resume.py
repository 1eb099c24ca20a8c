"""Find the checkpoint to resume from, and refuse to overwrite an existing run."""

from __future__ import annotations

from pathlib import Path

from lit_grpo.runs.files import last_checkpoint
from lit_grpo.types import UserError


def find_checkpoint(name: str, run_dir: Path) -> str:
    """Return the path of a checkpoint; ``last`` is the newest one of the run.

    Raises:
        UserError: there is none.
    """
    path = last_checkpoint(run_dir) if name == "last" else name
    if path is None:
        raise UserError(
            f"{run_dir} has no checkpoint to resume from. Omit ckpt_path to start a new run."
        )
    if "://" not in str(path) and not Path(path).exists():
        raise UserError(f"{path}: no such checkpoint. Set ckpt_path to a file or to last.")
    return str(path)


def run_of(checkpoint: str) -> Path:
    """Return the directory of the run that wrote a checkpoint, ``RUN/checkpoints/last.ckpt``."""
    return Path(checkpoint).parent.parent


def refuse_used(run_dir: Path) -> None:
    """Check that a new run would overwrite nothing.

    Raises:
        UserError: the directory already holds a run.
    """
    if (run_dir / "metrics.csv").exists() or any(run_dir.glob("checkpoints/*")):
        raise UserError(
            f"{run_dir} already holds a run, which a new one would overwrite. Resume it: lit-grpo "
            f"fit {run_dir} (in Python ckpt_path='last'). Or choose a different run_dir."
        )
