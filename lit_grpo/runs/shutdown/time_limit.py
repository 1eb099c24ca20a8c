"""End a run with a checkpoint before its time is up."""

from __future__ import annotations

import logging
import signal
import time
from datetime import datetime, timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Timer

from lit_grpo.runs.checkpoints.callback import Checkpoints
from lit_grpo.runs.files.events import num_finished_steps
from lit_grpo.runs.safe_points import StopAtSafePoints, stop_safely
from lit_grpo.runs.shutdown.slurm import job_end_time, requeue_job
from lit_grpo.stopping import ExitCode, exit_code_of_signal, get_stop_reason, stop_run
from lit_grpo.types import Stage, StopReason, setting_error
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)

SPARE_SECONDS = 60.0
"""Time to abandon a step and to close engines and loggers, and a margin."""
SAVES = 2.0
"""How much longer the last checkpoint may take than the longest so far."""
UNBROKEN_STAGES = ("logprob", "update")
"""Stages within which a step is not abandoned."""


@checks_keywords
@checks_types
class StopAtTimeLimit(StopAtSafePoints):
    """End a run in time for its last checkpoint, with exit code 7.

    The limits are ``trainer.max_time``, which counts all parts of a run together, and ``leave_by``.
    For the latter, a run stops when the time left falls to twice its longest checkpoint, plus its
    longest update and a minute. A step or a validation that samples or waits is
    abandoned, and a resumed run repeats it.

    Args:
        leave_by: ``auto`` for the end of the SLURM job, if the run is in one; ``never``; or a time
            such as ``2026-11-24T08:00``, local unless it has a time zone.
        requeue: Queue the SLURM job again if the run was ended by ``leave_by`` or by SIGUSR1.

    Raises:
        UserError: ``leave_by`` is none of these, or has passed.
    """

    def __init__(self, leave_by: str = "auto", requeue: bool = False) -> None:
        self.requeue = requeue
        self._is_of_job = leave_by == "auto"
        self._end = job_end_time() if self._is_of_job else _parse(leave_by)
        self._update_seconds = 0.0
        self._longest_update = 0.0
        self._first_step = 0
        """Rollout steps that were finished before this process."""
        self._has_ended_run = False
        """Whether ``leave_by`` ended the run."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if why := trainer.strategy.broadcast(_why_timer(trainer)):  # earlier parts took all of it
            message = f"Nothing was trained: {why}."
            stop_run(trainer, StopReason(exit_code=ExitCode.TIME_IS_UP, message=message))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._update_seconds = 0.0

    def on_stage_end(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        if stage.name in UNBROKEN_STAGES:
            self._update_seconds += stage.seconds
            self._longest_update = max(self._longest_update, self._update_seconds)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.should_stop:  # Lightning's own timer may have been the first to see it
            self.stop_if_due(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_step = num_finished_steps(trainer)

    def requeue_if_due(self, trainer: L.Trainer) -> None:
        """Queue the SLURM job again if the end of its time, or SIGUSR1, ended the run."""
        reason = get_stop_reason(trainer)
        has_signal = reason is not None and reason.exit_code == exit_code_of_signal(signal.SIGUSR1)
        if not self.requeue or not (has_signal or self._has_ended_run):
            return
        if num_finished_steps(trainer) > self._first_step:
            requeue_job()
        else:
            log.warning(
                "The SLURM job is not queued again: it has finished no rollout step, nor would the "
                "next one. Give it more time."
            )

    def stop_if_due(self, trainer: L.Trainer) -> None:
        """Stop all ranks, by the clock of the first."""
        if get_stop_reason(trainer) is not None:
            return
        why_timer, why_limit = trainer.strategy.broadcast(
            (_why_timer(trainer), self._why_limit(trainer))
        )
        if why := why_timer or why_limit:
            self._has_ended_run = not why_timer
            stop_safely(trainer, ExitCode.TIME_IS_UP, f"Ended after {{steps}}: {why}.")

    def _why_limit(self, trainer: L.Trainer) -> str:
        """Return why the run must stop now; empty if it need not."""
        if self._end is None:
            return ""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        saves = [one.longest_save for one in callbacks if isinstance(one, Checkpoints)]
        needed = SPARE_SECONDS + SAVES * max(saves, default=0.0) + self._longest_update
        if time.time() + needed < self._end:
            return ""
        end = f"{datetime.fromtimestamp(self._end):%Y-%m-%d %H:%M:%S}"
        return f"the SLURM job ends at {end}" if self._is_of_job else f"leave_by is {end}"


def requeue_if_asked(trainer: L.Trainer) -> None:
    """Queue the SLURM job of a run again, once the run is over, if that is configured."""
    for limit in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(limit, StopAtTimeLimit) and trainer.is_global_zero:
            limit.requeue_if_due(trainer)


def _why_timer(trainer: L.Trainer) -> str:
    """Return that ``trainer.max_time`` is reached; empty if it is not."""
    for timer in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(timer, Timer):
            left = timer.time_remaining()
            if left is not None and left <= 0:
                limit = timedelta(seconds=round(timer.time_elapsed() + left))
                return (
                    f"trainer.max_time is reached ({limit} for all parts of the run together); "
                    "raise it to go on"
                )
    return ""


def with_more_time(resume_with: str, trainer: L.Trainer) -> str:
    """Add twice the time to a command that resumes a run which has used up ``max_time``."""
    for timer in trainer.callbacks:  # type: ignore[attr-defined]
        left = timer.time_remaining() if isinstance(timer, Timer) else None
        if left is not None and left <= 0:
            seconds = 2 * round(timer.time_elapsed() + left)
            days, clock = divmod(seconds, 24 * 3600)
            more = f"{days:02}:{clock // 3600:02}:{clock // 60 % 60:02}:{clock % 60:02}"
            return f"{resume_with} --trainer.max_time {more}"
    return resume_with


def _parse(leave_by: str) -> float | None:
    """Return a time in seconds since the epoch; None for ``never``."""
    if leave_by == "never":
        return None
    try:
        end = datetime.fromisoformat(leave_by).timestamp()
    except (TypeError, ValueError):
        rule = "auto, never, or a time such as 2026-11-24T08:00"
        raise setting_error("leave_by", rule, leave_by) from None
    if end <= time.time():
        now = f"{datetime.now().astimezone():%Y-%m-%dT%H:%M%z}"
        raise setting_error("leave_by", "in the future", leave_by, f"it is {now}")
    return end
