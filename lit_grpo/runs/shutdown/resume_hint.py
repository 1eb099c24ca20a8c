"""Tell the user of an unfinished run how to resume it, and what to change first."""

from __future__ import annotations

import shlex
from pathlib import Path

import lightning as L

from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.runs.checkpoints.files import healthy_checkpoint, last_checkpoint, read_manifest
from lit_grpo.runs.shutdown.time_limit import with_more_time
from lit_grpo.stopping import ExitCode, for_this_run, get_stop_reason
from lit_grpo.types.paths import shown_path

RESUME_CALL = 'trainer.fit(…, ckpt_path="last")'
"""How a program resumes a run."""


def how_to_resume(trainer: L.Trainer, run_dir: Path, resume_with: str) -> str:
    """Return how to resume a run that is not done; empty if it has no checkpoint.

    A run that was stopped for lack of rewards would stop again, unless something changes first.

    Args:
        resume_with: The command or call that resumes the run from its newest checkpoint.
    """
    newest = last_checkpoint(run_dir)
    if newest is None:
        return ""
    how = resume_with if resume_with == RESUME_CALL else with_more_time(resume_with, trainer)
    plain = f"{_after_steps(newest)}with: {how}"
    reason = get_stop_reason(trainer)
    if reason is None or reason.exit_code != ExitCode.NO_REWARD:
        return f"Resume {plain}"
    cause = CAUSES.get(reason.cause)
    remedy = for_this_run(trainer, f" {cause.remedies[0]}") if cause else ""
    first = f"Resumed as it is, this run would stop again. First remove the cause.{remedy}"
    healthy = healthy_checkpoint(run_dir)
    if healthy is None:
        none = "No checkpoint is from a healthy step"
        return f"{first} {none}: then start a new run, or resume this one {plain}"
    if healthy.samefile(newest):
        return f"{first} Then resume {plain}"
    start = f"{_after_steps(healthy)}(the newest healthy checkpoint)"
    return f"{first} Then go on {start} with: {_from(healthy, how)}"


def _after_steps(checkpoint: Path) -> str:
    """Return from where a checkpoint resumes, as words in a sentence."""
    manifest = read_manifest(checkpoint)
    if manifest is None or manifest.rollout_step is None:
        return ""
    return f"after {manifest.rollout_step} step{'' if manifest.rollout_step == 1 else 's'} "


def _from(checkpoint: Path, how: str) -> str:
    """Return the command or call that resumes from a checkpoint other than the newest one."""
    path = shown_path(checkpoint)
    if how == RESUME_CALL:
        return f'trainer.fit(…, ckpt_path="{path}")'
    return f"{how} --ckpt_path {shlex.quote(path)}"
