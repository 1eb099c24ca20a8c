"""A fit loop that runs the last validation if the run was stopped before it.

Lightning ends a resumed run at once that has no step left. It goes back to a validation that was
left in any other step, if the counters of the checkpoint say so (`loop_counters`).
"""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop

from lit_grpo.runs.checkpoints.loop_counters import validates_next
from lit_grpo.stopping import has_taken_last_step


class ResumableFitLoop(_FitLoop):
    """Lightning's loop, which also resumes a run that has only a validation left."""

    def run(self) -> None:
        self.setup_data()
        if self._has_only_validation_left():
            self._validate_last_step()
        else:
            super().run()

    def _has_only_validation_left(self) -> bool:
        """Return whether the last step was taken, and the validation that is due there was left."""
        val_loop = self.epoch_loop.val_loop
        val_loop.update_restart_stage()
        is_left = val_loop.restarted_mid_evaluation and has_taken_last_step(self.trainer)
        return is_left and validates_next(self.trainer)

    def _validate_last_step(self) -> None:
        """Go on from the end of the last batch to the end of training."""
        torch.set_grad_enabled(True)
        epoch_loop, fetcher = self.epoch_loop, self._data_fetcher
        assert fetcher is not None
        self.on_run_start()
        epoch_loop.batch_progress.increment_completed()
        epoch_loop._batches_that_stepped += 1
        epoch_loop.on_advance_end(fetcher)
        self.restarting = False
        self.on_advance_end()
        self.on_iteration_done()
        self.on_run_end()


def make_last_validation(trainer: L.Trainer) -> None:
    """Let a resumed run make a validation that is all that it has left.

    A trainer makes its loop itself and puts its data into it, so the loop changes its class.
    """
    if type(trainer.fit_loop) is _FitLoop:
        trainer.fit_loop.__class__ = ResumableFitLoop
