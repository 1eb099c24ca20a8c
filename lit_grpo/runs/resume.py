"""Find the checkpoint to resume from, and refuse to overwrite an existing run."""

from __future__ import annotations

import logging
from pathlib import Path

from lit_grpo.runs.files import is_intact, last_checkpoint
from lit_grpo.types import UserError

log = logging.getLogger(__name__)


def find_checkpoint(name: str, run_dir: Path) -> str:
    """Return the path of a checkpoint; ``last`` is the newest one of the run.

    Raises:
        UserError: there is none.
    """
    path = name if name != "last" else _last_intact(run_dir)
    if path is None:
        raise UserError(
            f"{run_dir} has no intact checkpoint to resume from. Omit ckpt_path to start a new run."
        )
    if "://" not in str(path) and not Path(path).exists():
        raise UserError(f"{path}: no such checkpoint. Set ckpt_path to a file or to last.")
    if Path(path).exists() and not is_intact(Path(path)):
        raise UserError(
            f"{path} is damaged: it was not written to its end. Set ckpt_path to last, the newest "
            "intact checkpoint of a run."
        )
    return str(path)


def _last_intact(run_dir: Path) -> Path | None:
    for checkpoint in (run_dir / "checkpoints").glob("*.ckpt"):
        if not is_intact(checkpoint):
            log.warning("%s is damaged: it was not written to its end", checkpoint)
    return last_checkpoint(run_dir)


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
