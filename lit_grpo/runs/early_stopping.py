"""Lightning's `EarlyStopping` in runs that stop before a validation, and in runs that go on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.stopping import without_signal

log = logging.getLogger(__name__)


def look_after_validations(callbacks: Sequence[Callback]) -> None:
    """Let early stopping by a metric of the validation look at it after each validation.

    Lightning would choose the end of each epoch, where a run that ends before its first validation
    would fail without its last checkpoint.
    """
    for one in callbacks:
        if not (isinstance(one, EarlyStopping) and one.monitor.startswith("val/")):
            continue
        if one._check_on_train_epoch_end is None:
            one._check_on_train_epoch_end = False


class ResumedEarlyStopping(Callback):
    """Keep the decision of `EarlyStopping` when a run is resumed, and take its new patience.

    Lightning would train up to the next validation, end again, and write the final model again; and
    it would take the patience from the checkpoint.
    """

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        for one in trainer.callbacks:  # type: ignore[attr-defined]
            state = checkpoint["callbacks"].get(one.state_key)
            if isinstance(one, EarlyStopping) and state is not None:
                state["patience"] = one.patience
                if _has_ended_run(state):
                    trainer.should_stop = True
                    _say_ended(checkpoint, state)


def _has_ended_run(state: dict[str, Any]) -> bool:
    reason = EarlyStoppingReason(state["stopping_reason"])
    if reason is EarlyStoppingReason.PATIENCE_EXHAUSTED:
        return bool(state["wait_count"] >= state["patience"])
    return reason is not EarlyStoppingReason.NOT_STOPPED


@rank_zero_only
def _say_ended(checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
    why = without_signal(str(state["stopping_reason_message"]))
    log.info(
        "EarlyStopping ended this run at step %d: %s Nothing is left to train. To train on leave "
        "it out of trainer.callbacks, or give it more patience if that was its reason.",
        checkpoint["global_step"],
        why,
    )
