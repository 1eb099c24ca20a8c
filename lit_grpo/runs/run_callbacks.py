"""The callbacks and loggers of every training run, around the user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback, ProgressBar, WeightAveraging
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_grpo.runs.checkpoints.callback import Checkpoints
from lit_grpo.runs.early_stopping import ResumedEarlyStopping, check_after_validations
from lit_grpo.runs.files.completions import CompletionsFile
from lit_grpo.runs.files.events import EventsFile
from lit_grpo.runs.files.metrics import MetricsFile
from lit_grpo.runs.files.prompt_format import warn_of_other_format
from lit_grpo.runs.final_model import FinalModel
from lit_grpo.runs.health.monitor import HealthMonitor
from lit_grpo.runs.health.zero_reward import ZeroRewardBreaker
from lit_grpo.runs.progress.progress_bar import RolloutProgressBar
from lit_grpo.runs.shutdown.signals import StopOnSignal
from lit_grpo.runs.shutdown.time_limit import StopAtTimeLimit
from lit_grpo.runs.shutdown.watchdog import StallWatchdog
from lit_grpo.runs.wandb_teardown import WandbTeardown, write_into_run
from lit_grpo.types import setting_error

T = TypeVar("T")

GUARDS = (HealthMonitor, ZeroRewardBreaker, StallWatchdog)
"""Callbacks that every run has, unless one is listed with ``enabled: false``."""


def run_loggers(run_dir: str | Path, given: Logger | list[Logger] | bool | None) -> list[Logger]:
    """Return the loggers of a training run: ``metrics.csv`` first, then the user's."""
    loggers, run_dir = as_list(given), Path(run_dir).absolute()  # a reward may change directories
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            write_into_run(logger, run_dir)
    return [MetricsFile(run_dir), *loggers]


def run_callbacks(
    run_dir: str | Path,
    given: Callback | list[Callback] | None,
    *,
    loggers: Sequence[Logger] = (),
    enable_progress_bar: bool | None = None,
    enable_checkpointing: bool | None = None,
    leave_by: str = "auto",
    requeue: bool = False,
) -> list[Callback]:
    """Return the callbacks of a training run: checks, the user's, then every run's.

    Checkpoints come after all that they save the state of, and before the final model. Without
    them a signal ends the process at once, and so does the end of a SLURM job.

    Args:
        loggers: The loggers of the run.

    Raises:
        UserError: several are to write the checkpoints.
    """
    run_dir = Path(run_dir).absolute()  # a reward may change directories
    callbacks = with_progress_bar(given, enable_progress_bar)
    check_after_validations(callbacks)
    _refuse_repeated(callbacks)
    checkpoints = [one for one in callbacks if isinstance(one, Checkpoints)]
    if len(checkpoints) > 1:
        raise setting_error("trainer.callbacks", "a list with one Checkpoints", len(checkpoints))
    others = [one for one in callbacks if not isinstance(one, Checkpoints)]
    others = with_guards(others, loggers, run_dir)
    saving: list[Callback] = []
    if enable_checkpointing is not False:
        (checkpoint,) = checkpoints or [Checkpoints()]
        checkpoint.dirpath = checkpoint.dirpath or str(Path(run_dir) / "checkpoints")
        saving = [StopOnSignal(), StopAtTimeLimit(leave_by, requeue), checkpoint]
    averages = [ApplyWeightAverage(one) for one in others if isinstance(one, WeightAveraging)]
    of_metrics = [one for one in loggers if isinstance(one, MetricsFile)]
    files = [*of_metrics, CompletionsFile(run_dir), EventsFile(run_dir)]
    others = [CheckStart(run_dir), *others, ResumedEarlyStopping()]
    return [*others, *files, *saving, *averages, FinalModel(run_dir)]


class CheckStart(Callback):
    """Let the module check a start before other callbacks write what belongs to a run.

    At a first start it also looks at the run from which the policy comes. From then on the module
    records in the run's directory what it spends.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if check := getattr(pl_module, "check_start", None):
            check()
        if record := getattr(pl_module, "record_spending", None):
            record(self.run_dir)
        policy = getattr(pl_module, "policy", None)
        if policy is not None and trainer.ckpt_path is None:
            warn_of_other_format(trainer, policy.path)


class ApplyWeightAverage(Callback):
    """Give the policy its averaged weights after the last checkpoint and before the final model.

    The checkpoint has both. Lightning's callback replaces the weights first, so a resumed run
    would continue from the average.
    """

    def __init__(self, averaging: WeightAveraging) -> None:
        self._averaging = averaging
        averaging.on_train_end = lambda *_: None  # type: ignore[method-assign]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        type(self._averaging).on_train_end(self._averaging, trainer, pl_module)


def _refuse_repeated(callbacks: Sequence[Callback]) -> None:
    """Check that checkpoints can keep the states of the callbacks apart.

    Raises:
        UserError: two of them would have the same key.
    """
    stateful = [one for one in callbacks if is_overridden("state_dict", one, parent=Callback)]
    for key, number in Counter(one.state_key for one in stateful).items():
        if number > 1:
            kind = next(type(one).__name__ for one in stateful if one.state_key == key)
            raise setting_error(
                "trainer.callbacks",
                f"a list with one {kind} of each kind",
                number,
                f"checkpoints keep one state for {key}",
            )


def with_guards(
    given: Sequence[Callback], loggers: Sequence[Logger], run_dir: str | Path
) -> list[Callback]:
    """Return the user's callbacks, and those that guard every run, unless they are switched off.

    A callback of the user replaces the default one of its class. In an SFT run `HealthMonitor` and
    `ZeroRewardBreaker` find no rollouts, and do nothing.
    """
    callbacks = [*given]
    to_wandb = [one for one in loggers if isinstance(one, WandbLogger)]
    kinds: list[type[Callback]] = [*GUARDS, *([WandbTeardown] if to_wandb else [])]
    callbacks += [kind() for kind in kinds if not any(isinstance(one, kind) for one in given)]
    teardowns = [one for one in callbacks if isinstance(one, WandbTeardown)]
    for logger in to_wandb:
        teardowns[0].guard_start(logger, run_dir)
    return [one for one in callbacks if not isinstance(one, GUARDS) or one.enabled]


def has_lightnings_checkpoints(given: Callback | list[Callback] | None) -> bool:
    """Return whether the user listed a checkpoint callback of Lightning's.

    It needs ``enable_checkpointing``, with which Lightning adds one of its own if there is none.
    """
    return any(isinstance(one, LightningCheckpoint) for one in as_list(given))


def with_progress_bar(
    given: Callback | list[Callback] | None, enable_progress_bar: bool | None
) -> list[Callback]:
    """Return the user's callbacks, with a progress bar unless there is one or none is wanted."""
    callbacks = as_list(given)
    has_bar = any(isinstance(one, ProgressBar) for one in callbacks)
    is_wanted = enable_progress_bar is not False and not has_bar
    return [*callbacks, RolloutProgressBar()] if is_wanted else callbacks


def as_list(value: T | list[T] | tuple[T, ...] | bool | None) -> list[T]:
    """Return a trainer argument as a list; null, true and false are an empty one."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
