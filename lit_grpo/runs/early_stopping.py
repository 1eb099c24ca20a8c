"""Lightning's `EarlyStopping` in runs that stop before a validation, and in resumed runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.stopping import trim_early_stopping_reason

log = logging.getLogger(__name__)


def check_after_validations(callbacks: Sequence[Callback]) -> None:
    """Make early stopping by a metric of the validation check it after each validation.

    Lightning would choose the end of each epoch, where a run that ends before its first validation
    would fail without its last checkpoint.
    """
    for one in callbacks:
        if not (isinstance(one, EarlyStopping) and one.monitor.startswith("val/")):
            continue
        if one._check_on_train_epoch_end is None:
            one._check_on_train_epoch_end = False


class ResumedEarlyStopping(Callback):
    """Keep the decision of `EarlyStopping` when a run is resumed, unless its new settings undo it.

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
                if _has_ended_run(one, state):
                    trainer.should_stop = True
                    _log_end(checkpoint["global_step"], one, state)
                else:
                    state["stopping_reason"] = EarlyStoppingReason.NOT_STOPPED.value
                    state["stopping_reason_message"] = None


def _has_ended_run(callback: EarlyStopping, state: dict[str, Any]) -> bool:
    """Return whether what ended the run would also end it with the current settings."""
    reason = EarlyStoppingReason(state["stopping_reason"])
    if reason is EarlyStoppingReason.PATIENCE_EXHAUSTED:
        return bool(state["wait_count"] >= state["patience"])
    if reason is EarlyStoppingReason.STOPPING_THRESHOLD:
        return _is_beyond(callback.stopping_threshold, callback, state, sign=1)
    if reason is EarlyStoppingReason.DIVERGENCE_THRESHOLD:
        return _is_beyond(callback.divergence_threshold, callback, state, sign=-1)
    return reason is EarlyStoppingReason.NON_FINITE_METRIC and callback.check_finite


def _is_beyond(
    threshold: float | None, callback: EarlyStopping, state: dict[str, Any], *, sign: int
) -> bool:
    """Return whether the metric that ended a run, which its message names, is beyond a threshold.

    Args:
        sign: 1 if the threshold is one to reach, -1 if it is one of divergence.
    """
    if threshold is None:
        return False
    message = str(state["stopping_reason_message"])
    found = re.search(rf"{re.escape(callback.monitor)} = ([-+.\w]+)", message)
    if found is None:
        return True
    value, limit = torch.tensor(float(found[1])), torch.tensor(threshold)
    return bool(callback.monitor_op(sign * value, sign * limit))


@rank_zero_only
def _log_end(step: int, callback: EarlyStopping, state: dict[str, Any]) -> None:
    why = trim_early_stopping_reason(str(state["stopping_reason_message"]))
    higher, lower = ("raise", "lower") if callback.mode == "max" else ("lower", "raise")
    remedies = {
        EarlyStoppingReason.PATIENCE_EXHAUSTED: f"give it more patience than {callback.patience}",
        EarlyStoppingReason.STOPPING_THRESHOLD: f"{higher} or remove its stopping_threshold",
        EarlyStoppingReason.DIVERGENCE_THRESHOLD: f"{lower} or remove its divergence_threshold",
        EarlyStoppingReason.NON_FINITE_METRIC: "set its check_finite to false",
    }
    log.info(
        "EarlyStopping ended this run at step %d: %s Nothing is left to train. To train on, %s, or "
        "leave it out of trainer.callbacks.",
        *(step, why, remedies[EarlyStoppingReason(state["stopping_reason"])]),
    )
