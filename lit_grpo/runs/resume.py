"""Find the checkpoint to resume from, and refuse to overwrite an existing run."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from lit_grpo.runs.checkpoint_files import damage, newest_checkpoints
from lit_grpo.types import UserError, setting_error

log = logging.getLogger(__name__)


def find_checkpoint(name: str, run_dir: Path) -> str:
    """Return the path of a checkpoint; ``last`` is the newest intact one of the run.

    Raises:
        UserError: there is none.
    """
    if name == "last":
        return str(_newest_intact(run_dir))
    if "://" not in name and not Path(name).exists():
        raise UserError(f"{name}: no such checkpoint. Set ckpt_path to a file or to last.")
    if Path(name).exists() and (why := damage(Path(name), reads_all=True)):
        raise UserError(
            f"{name} is damaged: {why}. Set ckpt_path to last, the newest intact checkpoint of a "
            "run."
        )
    return name


def _newest_intact(run_dir: Path) -> Path:
    for checkpoint in newest_checkpoints(run_dir):
        why = damage(checkpoint, reads_all=True)
        if not why:
            return checkpoint
        log.warning("%s is damaged: %s", checkpoint, why)
    raise UserError(
        f"{run_dir} has no intact checkpoint to go on from. Start a new run, or name a checkpoint "
        "of a different one in ckpt_path."
    )


def refuse_past_the_end(checkpoint: str, max_steps: int, max_epochs: int | None) -> None:
    """Check that a checkpoint has not gone further than the run may, before a model is loaded.

    A checkpoint that is not a file, such as a sharded one, passes.

    Raises:
        UserError: it has taken more optimizer steps or epochs.
    """
    if not Path(checkpoint).is_file():
        return
    saved = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=False)
    if "loops" not in saved:  # weights only, which the trainer refuses
        return
    limits = {"max_steps": max_steps, "max_epochs": -1 if max_epochs is None else max_epochs}
    # `Checkpoints` corrects the epochs of the loop, not those at the top.
    epochs = saved["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"]
    taken = {"max_steps": saved["global_step"], "max_epochs": epochs}
    units = {"max_steps": "optimizer steps", "max_epochs": "epochs"}
    for name, limit in limits.items():
        if 0 <= limit < taken[name]:
            why = f"the checkpoint has taken {taken[name]} {units[name]}"
            raise setting_error(f"trainer.{name}", f">= {taken[name]}", limit, why)


def run_of(checkpoint: str) -> Path:
    """Return the directory of the run that wrote a checkpoint, ``RUN/checkpoints/last.ckpt``."""
    return Path(checkpoint).parent.parent


def refuse_used(run_dir: Path, resume_with: str) -> None:
    """Check that a new run would overwrite nothing.

    Args:
        resume_with: The command or call that resumes the run that is there.

    Raises:
        UserError: the directory already holds a run.
    """
    if (run_dir / "metrics.csv").exists() or any(run_dir.glob("checkpoints/*")):
        raise UserError(
            f"{run_dir} already holds a run, which a new one would overwrite. Resume it: "
            f"{resume_with}. Or choose a different run_dir."
        )
