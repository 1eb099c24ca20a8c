"""Lightning's counters of batches in a checkpoint, set so that a resumed run repeats nothing.

A step or a validation that was left unfinished is repeated.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import lightning as L

from lit_grpo.stopping import is_step_unfinished

FIRST_BATCH = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
"""Lightning's counters of a loop in its first batch."""


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
