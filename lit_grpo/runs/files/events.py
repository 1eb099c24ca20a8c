"""The file ``events.jsonl`` of a run: when it started, resumed, warned, rolled back and ended.

Metrics are the numbers of each step; events describe in words what happened to a run.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_grpo.diagnostics.causes.table import cause_of_exit
from lit_grpo.diagnostics.errors import cause_of_error
from lit_grpo.runs.files.config import is_of_another_run
from lit_grpo.runs.files.event_log import (
    LEAKED,
    Event,
    EventKind,
    append_event,
    now,
    read_events,
    read_starts,
)
from lit_grpo.runs.files.secrets import change_without_secrets
from lit_grpo.stopping import for_this_run, get_stop_reason, how_it_ended, is_step_unfinished

__all__ = ["Event", "EventKind", "EventsFile", "read_events", "record_event"]


def num_finished_steps(trainer: L.Trainer) -> int:
    """Return the rollout steps (for SFT: batches) that a resumed run does not repeat."""
    return trainer.fit_loop.total_batch_idx + 1 - is_step_unfinished(trainer)


def is_resumed(trainer: L.Trainer) -> bool:
    """Return whether a training run is resumed, also from a checkpoint without finished steps."""
    return num_finished_steps(trainer) > 0 or bool(trainer.ckpt_path)


def record_event(
    trainer: L.Trainer, kind: EventKind, message: str = "", cause: str = "", **others: Any
) -> None:
    """Tell the callbacks with an ``on_event(trainer, event)`` what has happened, on rank 0.

    Args:
        others: Further fields of the `Event`.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total  # a step may be running
    event = Event(
        time=now(),
        step=min(num_finished_steps(trainer), progress.processed),
        kind=kind,
        message=for_this_run(trainer, message),
        cause=cause,
        **others,
    )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if listener := getattr(callback, "on_event", None):
            listener(trainer, event)


def has_begun(trainer: L.Trainer) -> bool:
    """Return whether a training run of this process has begun; not if no step was left to take."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return any(one.has_begun for one in callbacks if isinstance(one, EventsFile))


class EventsFile(Callback):
    """Write the events of a run to ``events.jsonl``, its start and its end among them."""

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = run_dir
        self.has_begun = False
        """Whether the training has begun; false again when the next one of the process starts."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Tell the module with which settings the run was last resumed."""
        if stage != "fit":
            return
        self.has_begun = False
        if (take := getattr(pl_module, "take_last_start", None)) is not None:
            starts = read_starts(self.run_dir) if trainer.is_global_zero else []
            last = (starts[-1].settings, starts[-1].step) if starts else ({}, 0)
            is_foreign = partial(is_of_another_run, run_dir=Path(self.run_dir))
            take(*trainer.strategy.broadcast(last), is_foreign)

    def on_event(self, trainer: L.Trainer, event: Event) -> None:
        """Append an event.

        A file that cannot be written does not end a run: the checkpoints report a full disk.
        """
        with suppress(OSError):
            append_event(self.run_dir, event)

    def on_outage(self, trainer: L.Trainer, pl_module: L.LightningModule, outage: Any) -> None:
        """Record that a run waits for something, or has had to restart it."""
        record_event(trainer, "alert", outage.message, outage.cause)

    def on_skipped_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, message: str
    ) -> None:
        record_event(trainer, "warning", message, "not_finite_gradient")

    def on_unscored(self, trainer: L.Trainer, pl_module: L.LightningModule, message: str) -> None:
        record_event(trainer, "warning", message)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.has_begun = True
        kind: EventKind = "resume" if is_resumed(trainer) else "start"
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        held_out = getattr(data, "validation_hash", "")
        policy = str(getattr(getattr(pl_module, "policy", None), "path", None) or "")
        directory = str(Path.cwd())
        of_start = {"directory": directory, "held_out": held_out, "policy": policy}
        changes = [change_without_secrets(one) for one in getattr(pl_module, "changes", ())]
        settings = getattr(pl_module, "settings_of_start", {})
        record_event(trainer, kind, **of_start, changes=changes, settings=settings)
        leaked = getattr(data, "leaked", "")
        if leaked and trainer.enable_validation:
            record_event(trainer, "warning", leaked, LEAKED)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        reason = get_stop_reason(trainer)
        if reason is None:
            record_event(trainer, "done", how_it_ended(trainer))
        else:
            cause = reason.cause or cause_of_exit(reason.exit_code)
            record_event(trainer, "stop", reason.message, cause)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record that a stopped run is done, if its resume found no steps left."""
        if self.has_begun or get_stop_reason(trainer) is not None:
            return
        earlier = read_events(self.run_dir)
        if earlier and earlier[-1].kind != "done":
            record_event(trainer, "done", how_it_ended(trainer))

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self.has_begun:  # else there may be no run directory
            message = f"{type(exception).__name__}: {exception}"
            if isinstance(exception, KeyboardInterrupt):
                message = "Ended by SIGINT, without a new checkpoint."
            record_event(trainer, "crash", message, cause_of_error(exception))
