"""Refuse to resume from a checkpoint that does not fit, and to overwrite a run."""

from __future__ import annotations

import socket
from pathlib import Path

from lit_grpo.distributed.ranks import gather_objects
from lit_grpo.runs.checkpoints.files import read_state
from lit_grpo.runs.files.config import run_of
from lit_grpo.runs.files.event_log import NAME as EVENTS
from lit_grpo.types import UserError, setting_error


def check_checkpoint_fits(
    checkpoint: str, *, is_grpo: bool, max_steps: int = -1, max_epochs: int | None = None
) -> None:
    """Check that a run can resume from a checkpoint, before a model is loaded.

    A checkpoint that is not on this machine passes.

    Args:
        is_grpo: Whether the run is one of GRPO, else of SFT.
        max_steps: Optimizer steps that the run may take; -1 for no limit.
        max_epochs: Epochs that it may take; None or -1 for no limit.

    Raises:
        UserError: the checkpoint is of the other kind of training, or took more optimizer steps
            or epochs.
    """
    if not Path(checkpoint).exists():
        return
    saved = read_state(Path(checkpoint))
    if "loops" not in saved:  # weights only, which the trainer refuses
        return
    if ("rollout_step" in saved) != is_grpo:
        command, other = ("fit", "sft") if is_grpo else ("sft", "fit")
        raise UserError(
            f"{checkpoint} was written by lit-grpo {other}, and cannot be used with the config of "
            f"lit-grpo {command}. To start from its policy set model.policy.path to "
            f"{run_of(checkpoint) / 'final'}."
        )
    limits = {"max_steps": max_steps, "max_epochs": -1 if max_epochs is None else max_epochs}
    if all(limit < 0 for limit in limits.values()):
        return
    # `Checkpoints` corrects the epochs of the loop, not those at the top.
    epochs = saved["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"]
    taken = {"max_steps": saved["global_step"], "max_epochs": epochs}
    units = {"max_steps": "optimizer steps", "max_epochs": "epochs"}
    for name, limit in limits.items():
        if 0 <= limit < taken[name]:
            why = f"the checkpoint has taken {taken[name]} {units[name]}"
            raise setting_error(f"trainer.{name}", f">= {taken[name]}", limit, why)


def check_same_checkpoint_on_ranks(checkpoint: str | Path | None) -> None:
    """Check that all ranks resume from the same checkpoint; every rank must call this.

    Machines that do not share the run directory may have different ones, and those without would
    begin at the first step.

    Raises:
        UserError: they do not.
    """
    own = "none"
    if checkpoint is not None:
        path = Path(checkpoint).resolve()
        own = f"{path.name} of {path.stat().st_size:,} bytes" if path.is_file() else path.name
    found = gather_objects((socket.gethostname(), own))
    if len({one for _, one in found}) > 1:
        ranks = ", ".join(f"rank {n} on {host}: {one}" for n, (host, one) in enumerate(found))
        raise UserError(
            f"ckpt_path must be the same checkpoint on all ranks, got {ranks} (ranks that do not "
            "go on from the same step would train on different weights). Let all machines share "
            "run_dir, or copy its checkpoints to each of them."
        )


def check_run_dir_is_new(run_dir: Path, resume_with: str) -> None:
    """Check that a new run would overwrite nothing.

    Args:
        resume_with: The command or call that resumes the existing run.

    Raises:
        UserError: the directory already holds a run.
    """
    has_checkpoint = any(run_dir.glob("checkpoints/*"))
    if has_checkpoint or (run_dir / "metrics.csv").exists():
        how = f"Resume it: {resume_with}"
        if not has_checkpoint:
            how = "It has no checkpoint: to start it again there, set ckpt_path to auto"
        raise UserError(
            f"{run_dir} already holds a run, which a new one would overwrite. {how}. Or choose a "
            "different run_dir."
        )


def enclosing_run(run_dir: Path) -> Path | None:
    """Return the nearest run that a directory is inside of, or None.

    A directory that has only one of ``metrics.csv`` and ``checkpoints/`` may be anything.
    """
    for place in run_dir.absolute().parents:
        has_both = (place / "metrics.csv").is_file() and (place / "checkpoints").is_dir()
        if has_both or (place / EVENTS).is_file():
            return place
    return None
