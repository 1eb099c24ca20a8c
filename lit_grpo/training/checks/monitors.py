"""Check that the metrics that callbacks watch will be logged."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.diagnostics.monitors import describe_unknown
from lit_grpo.training.evaluation import Evaluation
from lit_grpo.types import Prompt, UserError

log = logging.getLogger(__name__)

OURS = ("lit_grpo", "lightning")
"""Packages that log nothing else of a validation."""
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
        prompts: Those of the validation; none if no validation will run.

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
    """Warn, after a step, of callbacks that watch a metric that it has not logged."""
    logged = trainer.callback_metrics
    for _, kind, monitor in _watching(trainer):
        if monitor not in logged and not monitor.startswith("val"):
            _warn(f"{describe_unknown(kind, monitor, logged)}, unless a later step logs it.")


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
    fix = "data.validation, or data.validation_size to hold out rows"
    if trainer.limit_val_batches == 0:
        fix = "trainer.limit_val_batches above 0"
    return (
        f"{kind} watches {monitor} at each validation, but no validation will run. Set {fix}; or "
        "correct its monitor in trainer.callbacks"
    )


@rank_zero_only
def _warn(message: str) -> None:
    log.warning("%s", message)
