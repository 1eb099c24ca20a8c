"""Check that the metrics that callbacks watch are logged, and that Lightning checks them."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.diagnostics.unlogged_metric import describe_unknown
from lit_grpo.training.evaluation import Evaluation
from lit_grpo.types import Prompt, UserError

log = logging.getLogger(__name__)

OURS = ("lit_grpo", "lightning")
"""Packages that log nothing else of a validation."""
HOW_TO_CHECK_AFTER_VALIDATIONS = (
    "To let it look after each validation, set its check_on_train_epoch_end to false, "
    "trainer.check_val_every_n_epoch to null, trainer.val_check_interval to a number of steps"
)
MORE_IS_BETTER = re.compile(r"reward/mean|(val|test)/(.+/)?(accuracy|(avg|pass)@\d+)")
"""Metrics of which the highest value is the best."""


def check_monitors(
    module: L.LightningModule, evaluation: Evaluation, prompts: Sequence[Prompt]
) -> None:
    """Check that something will log the validation metrics that callbacks watch, and which is best.

    Otherwise a callback ends the run at the first validation or the end of an epoch, which may be
    hours away. Which metrics the steps have is not known before there is one; then see
    `warn_of_unlogged`.

    Args:
        prompts: The validation's prompts; none if no validation will run.

    Raises:
        UserError: nothing can, or a callback takes the lowest accuracy or reward for the best.
            There is only a warning if code of the user's may log the metric, or the callback does
            without it.
    """
    trainer = module.trainer
    is_certain = not evaluation.measures_more and all(
        map(_logs_no_other, (module, *trainer.callbacks))  # type: ignore[attr-defined]
    )
    known = evaluation.metric_names(prompts) if prompts else []
    for callback, kind, monitor in _watching(trainer):
        unknown = describe_unknown(kind, monitor, known)
        problem = unknown if prompts else _without_validation(kind, monitor, trainer)
        if not prompts and getattr(callback, "needs_validation", False):
            _warn(f"{problem}.")
        elif monitor.startswith("val") and monitor not in known:
            if is_certain and getattr(callback, "strict", True):
                raise UserError(f"{problem}.")
            _warn(f"{problem}, unless code of yours logs it.")
        is_min = isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.mode == "min"
        if is_min and MORE_IS_BETTER.fullmatch(monitor):
            raise UserError(
                f"{kind}.mode must be max to watch {monitor}, got min, its default (it would take "
                "the lowest value for the best). Set mode: max in trainer.callbacks."
            )


def warn_of_unlogged(trainer: L.Trainer) -> None:
    """Warn, after a step, of callbacks that watch a metric that it did not log."""
    logged = trainer.callback_metrics
    for _, kind, monitor in _watching(trainer):
        if monitor not in logged and not monitor.startswith("val"):
            _warn(f"{describe_unknown(kind, monitor, logged)}, unless a later step logs it.")


def warn_if_never_checked(
    trainer: L.Trainer, *, num_steps: float, per_epoch: float, has_validation: bool
) -> None:
    """Warn of early stopping by a metric of steps that Lightning never checks before the end.

    It checks after each validation, or, unless validations are counted in steps, at the end of each
    epoch.

    Args:
        num_steps: Steps of the run by ``max_steps``; infinite without.
        per_epoch: Steps of an epoch; infinite if that is not known.
    """
    if (trainer.max_epochs or -1) > 0:
        num_steps = min(num_steps, (trainer.max_epochs or 0) * per_epoch)
    for callback, kind, monitor in _watching(trainer):
        if type(callback) is not EarlyStopping or monitor.startswith("val"):
            continue
        at_epochs = _checks_at_epoch_ends(callback, trainer)
        if at_epochs and num_steps <= per_epoch < math.inf:
            rows = "" if has_validation else f", and {_hold_out(trainer)}"
            _warn(
                f"{kind} watches {monitor} at the end of each epoch, but the run of "
                f"{num_steps:.0f} steps ends no later than its first epoch, of {per_epoch:.0f}, so "
                f"it never ends the run. {HOW_TO_CHECK_AFTER_VALIDATIONS}{rows}."
            )
        elif not (at_epochs or has_validation):
            has_epochs = per_epoch < num_steps
            other = ", or its check_on_train_epoch_end to true" if has_epochs else ""
            _warn(
                f"{kind} watches {monitor} after each validation, but no validation will run, so "
                f"it never ends the run. Set {_hold_out(trainer)}{other}."
            )


def _checks_at_epoch_ends(callback: EarlyStopping, trainer: L.Trainer) -> bool:
    """Return whether it looks at the end of epochs, not after validations; also before `setup`."""
    given = callback._check_on_train_epoch_end
    if given is not None:
        return given
    return trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1


def _watching(trainer: L.Trainer) -> Iterator[tuple[L.Callback, str, str]]:
    """Yield each callback that watches a metric, with its class and the metric."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str):
            yield callback, type(callback).__name__, monitor


def _logs_no_other(one: object) -> bool:
    """Return whether a module or a callback logs no metric of the user's."""
    package = type(one).__module__.partition(".")[0]
    return package in OURS and not isinstance(one, LambdaCallback)


def _without_validation(kind: str, monitor: str, trainer: L.Trainer) -> str:
    return (
        f"{kind} watches {monitor} at each validation, but no validation will run. Set "
        f"{_hold_out(trainer)}; or correct its monitor in trainer.callbacks"
    )


def _hold_out(trainer: L.Trainer) -> str:
    """Return what to set for validations."""
    if trainer.limit_val_batches == 0:
        return "trainer.limit_val_batches above 0"
    return "data.validation, or data.validation_size to hold out rows"


@rank_zero_only
def _warn(message: str) -> None:
    log.warning("%s", message)
