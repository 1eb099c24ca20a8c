"""Lightning's counters of batches in a checkpoint, set so that a resumed run repeats nothing.

A step or a validation that was left unfinished is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, Literal

import lightning as L

from lit_grpo.runs.files.events import num_finished_steps
from lit_grpo.stopping import get_stop_reason, is_step_unfinished

FIRST_BATCH = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
"""Lightning's counters of a loop in its first batch."""


class LoopPosition:
    """Where training is while it runs, and what follows for a checkpoint that is saved there."""

    def __init__(self) -> None:
        self._moment: Literal["step", "validation", "end"] = "step"
        """The part of training that has just ended."""
        self._validates_after = False
        """Whether a validation belongs to the end of this step."""
        self._validated_step = -1
        self._unmoved: dict[str, Any] | None = None
        """Lightning's counters as they were loaded, until a resumed run begins something."""

    @property
    def is_at_end(self) -> bool:
        return self._moment == "end"

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        self._unmoved = checkpoint.get("loops", {}).get("fit_loop")

    def begin_batch(self, trainer: L.Trainer) -> None:
        self._unmoved = None
        self._validates_after = validates_next(trainer)  # a stop would hide it

    def end_batch(self) -> None:
        self._moment = "step"

    def end_validation(self, trainer: L.Trainer) -> None:
        """Note a validation of a fit, of which one before the first step belongs to no step."""
        self._unmoved = None
        if trainer.global_step > 0:
            self._moment, self._validated_step = "validation", num_finished_steps(trainer)

    def end_training(self) -> None:
        self._moment = "end"

    def has_validated(self, trainer: L.Trainer) -> bool:
        """Return whether the validation of this step is done."""
        return self._validated_step == num_finished_steps(trainer)

    def correct(self, loops: dict[str, Any], trainer: L.Trainer) -> None:
        """Set the counters of a checkpoint that is being saved."""
        if self._unmoved is not None:  # stopped before its first step
            loops["fit_loop"] = self._unmoved
            return
        settle_validation(loops["fit_loop"])
        if self._moment == "validation":
            undo_completed_batch(loops["fit_loop"])
        elif self._moment == "end":
            undo_end(loops["fit_loop"], trainer, self._has_left_validation(trainer))

    def _has_left_validation(self, trainer: L.Trainer) -> bool:
        """Return whether a stop cut off a validation, or prevented the one due at this step."""
        reason = get_stop_reason(trainer)
        if reason is None or reason.is_step_unfinished:
            return False
        is_missing = self._validates_after and not self.has_validated(trainer)
        return reason.is_validation_unfinished or is_missing


def validates_next(trainer: L.Trainer) -> bool:
    """Return whether Lightning validates after this step, by its own rule."""
    loop = trainer.fit_loop
    val_loop = loop.epoch_loop.val_loop
    is_due: bool = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]
    has_no_prompts = val_loop._combined_loader is not None and val_loop.skip
    return is_due and trainer.enable_validation and not has_no_prompts


def settle_validation(loops: dict[str, Any]) -> None:
    """Count no batch of a finished validation as left undone.

    Lightning resets ``current`` alone when it goes back to a validation that was left, so
    ``total`` stays one batch ahead. Later resumes of the run would also repeat their validation.
    """
    progress = loops["epoch_loop.val_loop.batch_progress"]
    total, current = progress["total"], progress["current"]
    if current["ready"] == current["completed"]:
        total |= dict.fromkeys(FIRST_BATCH, total["completed"])


def undo_completed_batch(loops: dict[str, Any]) -> None:
    """Set the counters to ``on_train_batch_end``, from where Lightning resumes exactly."""
    for span in ("total", "current"):
        loops["epoch_loop.batch_progress"][span]["completed"] -= 1


def undo_end(loops: dict[str, Any], trainer: L.Trainer, has_left_validation: bool) -> None:
    """Set the loop counters to the end of the last batch.

    From the end of training a resume is not exact: Lightning counts the epoch as finished even when
    it was cut short, drops the position of the data loader, and may count a step twice. A step that
    was left undone is not counted, so a resumed run repeats it. A validation that was left
    stands in its first batch, so Lightning goes back to it.
    """
    undo_completed_batch(loops)
    for span in ("total", "current"):
        loops["epoch_progress"][span]["processed"] -= 1
        loops["epoch_progress"][span]["completed"] -= 1
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    if has_left_validation:
        progress = loops["epoch_loop.val_loop.batch_progress"]
        progress["is_last_batch"] = False
        for span in ("total", "current"):
            progress[span] |= FIRST_BATCH
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    if is_step_unfinished(trainer):
        progress = loops["epoch_loop.batch_progress"]
        progress["is_last_batch"] = False
        for span, counter in product(("total", "current"), progress["total"]):
            progress[span][counter] -= 1
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
