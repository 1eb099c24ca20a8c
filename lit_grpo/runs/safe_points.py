"""The points of a training run at which it can end without losing anything."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_grpo.stopping import stop_run
from lit_grpo.types import StopReason


class StopAtSafePoints(Callback):
    """Ask between two steps, after a validation, and while a step waits, whether to end the run."""

    def stop_if_due(self, trainer: L.Trainer) -> None:
        """Call `stop_safely`, on all ranks or on none, if the run is to end."""
        raise NotImplementedError

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if is_between_steps(trainer):
            self.stop_if_due(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_validation_of_fit(trainer) and is_between_steps(trainer):
            self.stop_if_due(trainer)

    def on_wait(self, trainer: L.Trainer, pl_module: L.LightningModule, _: None) -> None:
        """Stop without finishing the step: what it waits for may take long to arrive."""
        self.stop_if_due(trainer)


def stop_safely(trainer: L.Trainer, exit_code: int, message: str) -> None:
    """Stop between two steps or within one, which is then left undone.

    Args:
        message: Says ``{steps}`` where the number of finished steps belongs.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    num_steps = progress.processed
    reason = StopReason(
        exit_code=exit_code,
        message=message.format(steps=f"{num_steps} rollout step{'' if num_steps == 1 else 's'}"),
        is_step_unfinished=progress.ready > num_steps,
    )
    stop_run(trainer, reason)


def is_validation_of_fit(trainer: L.Trainer) -> bool:
    """Return whether the validation that has just ended is one of a training run."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def is_between_steps(trainer: L.Trainer) -> bool:
    """Return whether no gradients are being accumulated, which a stop or a save would lose."""
    num_batches = trainer.fit_loop.batch_idx + 1
    return num_batches % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
