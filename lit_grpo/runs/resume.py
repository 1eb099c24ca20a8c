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


def refuse_used(run_dir: Path) -> None:
    """Check that a new run would overwrite nothing.

    Raises:
        UserError: the directory already holds a run.
    """
    if (run_dir / "metrics.csv").exists() or any(run_dir.glob("checkpoints/*")):
        raise UserError(
            f"{run_dir} already holds a run, which a new one would overwrite. Set ckpt_path to "
            "last to resume it, or choose a different run_dir."
        )
