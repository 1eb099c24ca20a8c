"""Lightning's loops, which make the validation that a stop in the last step of a run has prevented.

Lightning ends a resumed run at once that has no step left. It goes back to a validation that was
left in any other step, if the counters of the checkpoint say so (`loop_counters`).
"""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from lit_grpo.runs.checkpoints.loop_counters import validates_next
from lit_grpo.stopping import has_taken_last_step


class FitLoop(_FitLoop):
    """Lightning's loop, which is not done while the validation of the last step is left."""

    _starts_at_last_validation = False

    def run(self) -> None:
        self.setup_data()
        self.epoch_loop.val_loop.update_restart_stage()
        self._starts_at_last_validation = (
            has_taken_last_step(self.trainer)
            and self.epoch_loop.val_loop.restarted_mid_evaluation
            and validates_next(self.trainer)
        )
        super().run()

    @property
    def has_only_validation_left(self) -> bool:
        """Whether a resumed run has taken its last step, and not made the validation due there."""
        return self._starts_at_last_validation and self.restarting

    @property
    def done(self) -> bool:
        return super().done and not self.has_only_validation_left

    def reset(self) -> None:
        if not self.has_only_validation_left:
            super().reset()
            return
        torch.set_grad_enabled(True)
        self.update_restart_stage()  # Lightning would count the epoch as finished, and again later


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop, which stays in its last batch while that one's validation is left."""

    def reset(self) -> None:
        fit_loop = self.trainer.fit_loop
        if not isinstance(fit_loop, FitLoop) or not fit_loop.has_only_validation_left:
            super().reset()
            return
        self.batch_progress.increment_completed()  # Lightning would begin the next epoch
        self._batches_that_stepped += 1


def make_last_validation(trainer: L.Trainer) -> None:
    """Let a resumed run make a validation that is all that it has left.

    A trainer makes its loops itself and puts its data into them, so they change their class.
    """
    loop = trainer.fit_loop
    if type(loop) is _FitLoop and type(loop.epoch_loop) is _TrainingEpochLoop:
        loop.__class__ = FitLoop
        loop.epoch_loop.__class__ = EpochLoop
