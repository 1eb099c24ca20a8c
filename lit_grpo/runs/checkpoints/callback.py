"""Decide when a run writes a checkpoint: at its end, at intervals, and of the best policy."""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.diagnostics.unlogged_metric import describe_unknown
from lit_grpo.runs.checkpoints.files import BEST_FILE, LAST, SUMMARY, is_healthy
from lit_grpo.runs.checkpoints.fit_loop import make_last_validation
from lit_grpo.runs.checkpoints.loop_counters import LoopPosition, validates_next
from lit_grpo.runs.checkpoints.resume_checks import check_same_checkpoint_on_ranks
from lit_grpo.runs.checkpoints.retention import KeptCheckpoints
from lit_grpo.runs.checkpoints.start_checks import refuse_unreadable, warn_if_at_once
from lit_grpo.runs.checkpoints.writer import CheckpointWriter, wait_until_written, when_written
from lit_grpo.runs.files.event_log import now
from lit_grpo.runs.files.events import num_finished_steps
from lit_grpo.runs.files.metrics import MetricsFile
from lit_grpo.runs.files.writable import check_writable
from lit_grpo.runs.safe_points import is_between_steps, is_validation_of_fit
from lit_grpo.stopping import get_stop_reason
from lit_grpo.types import check_range
from lit_grpo.types.errors import as_rank_lost
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.paths import at_home

log = logging.getLogger(__name__)

MAX_SHARE = 0.05
"""Share of a run's time that checkpoints at an interval of time may take."""


@checks_keywords
@checks_types
class Checkpoints(Callback):
    """Write checkpoints that a run resumes from exactly: at its end, at intervals, and its best.

    They are called ``step_000120.ckpt`` after the finished rollout steps (for SFT: batches), and
    ``last.ckpt`` is a link to the newest. One is written at the end whether training is done or
    was stopped by a callback or a signal. A checkpoint is written under another name and moved, so
    that a kill during the save leaves the earlier ones; ``lit-grpo checkpoints RUN`` lists them.

    With an interval, one is also written after the first healthy step, so that there is a state to
    go back to before the first interval is over, and a save that cannot work fails at once.

    Args:
        every_n_steps: Rollout steps between two checkpoints; null writes none by their number.
        every_n_seconds: Time between two checkpoints, written after a rollout step; null writes
            none by time. It is longer where they would take more than 5% of the time.
        keep_last: Number of these checkpoints to keep. The newest one of a healthy run is kept,
            too, while a callback such as ``ZeroRewardBreaker`` sees trouble.
        monitor: Metric by which ``best.ckpt`` is chosen after each validation, such as
            ``val/accuracy``; null writes none.
        mode: Whether the highest or the lowest value is the best.
        dirpath: Directory of the checkpoints; null is ``checkpoints`` in the run directory.
        in_background: Write the checkpoints of ``fsdp2`` while training continues. Each rank needs
            host memory for a copy of its part. Others are written at once, with a warning.

    Raises:
        UserError: a number is out of range.
    """

    needs_validation = True
    """Whether ``monitor`` is read only after a validation, even if it is no ``val/`` metric."""

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_seconds: float | None = 600.0,
        keep_last: int = 2,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        dirpath: str | None = None,
        in_background: bool = False,
    ) -> None:
        key = "Checkpoints.init_args."
        if every_n_steps is not None:
            check_range(f"{key}every_n_steps", every_n_steps, at_least=1)
        if every_n_seconds is not None:
            check_range(f"{key}every_n_seconds", every_n_seconds, above=0)
        check_range(f"{key}keep_last", keep_last, at_least=1)
        self.every_n_steps = every_n_steps
        self.every_n_seconds = every_n_seconds
        self.keep_last = keep_last
        self.monitor = monitor
        self.mode = mode
        self.dirpath = None if dirpath is None else at_home(dirpath)
        self.in_background = in_background
        self._dirpath_of_run: Path | None = None
        self.best: float | None = None
        """The best value of the monitored metric so far."""
        self.longest_save = 0.0
        """Seconds that the longest checkpoint of this process took."""
        self._is_monitor_warned = False
        self._saved_at = 0.0
        self._save_seconds = 0.0
        self._has_healthy = False
        """Whether the run has a checkpoint from before any trouble."""
        self._is_waiting = False
        """Whether a checkpoint is due once the validation of this step is done."""
        self._position = LoopPosition()

    @property
    def directory(self) -> Path:
        path = self.dirpath or self._dirpath_of_run
        assert path is not None, "setup() comes first"
        return Path(path).absolute()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._dirpath_of_run = Path(trainer.default_root_dir) / "checkpoints"
        make_last_validation(trainer)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = CheckpointWriter(
                in_background=self.in_background,
                timeout=getattr(trainer.strategy, "_timeout", None),
            )
        if self.in_background and stage == "fit":
            warn_if_at_once(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_same_checkpoint_on_ranks(trainer.ckpt_path)
        check_writable("Checkpoints.init_args.dirpath", self.directory, self.directory)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_at = time.monotonic()
        refuse_unreadable(trainer, pl_module)
        if getattr(pl_module, "has_other_validation", False):
            self.best = None
        self._kept = KeptCheckpoints(self.directory, self.keep_last)
        manifests = self._kept.read_manifests() if trainer.ckpt_path else {}
        self._has_healthy = any(map(is_healthy, manifests.values()))
        if trainer.ckpt_path and trainer.is_global_zero:
            steps = num_finished_steps(trainer)
            self._kept.resume_from(Path(str(trainer.ckpt_path)), steps, manifests)
        for other in self._sharing_callbacks(trainer):
            # Otherwise it would avoid a ``last.ckpt`` that it did not write itself.
            other.last_model_path = other.last_model_path or os.path.join(str(other.dirpath), LAST)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._position.load(checkpoint)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._position.begin_batch(trainer)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._position.end_batch()
        self._is_waiting = False
        is_ending = trainer.should_stop or get_stop_reason(trainer) is not None
        if is_ending or not is_between_steps(trainer) or not self._is_due(trainer):
            return
        if validates_next(trainer):  # a resumed run does not repeat the validation
            self._is_waiting = True
        else:
            _log_step(trainer, outputs)
            self._save(trainer)

    def _is_due(self, trainer: L.Trainer) -> bool:
        """Return whether an interval has passed, or the first healthy step, on all ranks alike."""
        has_interval = self.every_n_steps is not None or self.every_n_seconds is not None
        if trainer.fast_dev_run or not has_interval:  # type: ignore[attr-defined]
            return False
        if self.every_n_steps is not None and num_finished_steps(trainer) % self.every_n_steps == 0:
            return True
        is_first = not self._has_healthy and not trouble_of(trainer)
        is_due: bool = trainer.strategy.broadcast(
            bool(self._kept.left_behind) or is_first or self._has_time_passed()
        )
        return is_due

    def _has_time_passed(self) -> bool:
        if self.every_n_seconds is None:
            return False
        seconds = max(self.every_n_seconds, self._save_seconds / MAX_SHARE)
        return time.monotonic() - self._saved_at >= seconds

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not is_validation_of_fit(trainer):
            return
        self._position.end_validation(trainer)
        if trainer.global_step == 0:
            return
        if not trainer.fast_dev_run and self._is_best(trainer):  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.directory / BEST_FILE)
        if self._is_waiting and get_stop_reason(trainer) is None:
            self._save(trainer)
        self._is_waiting = False

    def _is_best(self, trainer: L.Trainer) -> bool:
        """Return whether the monitored metric is better than ever, and remember it."""
        if self.monitor is None:
            return False
        if self.monitor not in trainer.callback_metrics and not self._is_monitor_warned:
            self._is_monitor_warned = True
            message = describe_unknown("Checkpoints", self.monitor, trainer.callback_metrics)
            rank_zero_only(log.warning)("%s. Until then there is no best.ckpt.", message)
        value = float(trainer.callback_metrics.get(self.monitor, math.nan))
        sign = 1 if self.mode == "max" else -1
        if math.isnan(value) or (self.best is not None and sign * value <= sign * self.best):
            return False
        self.best = value
        return True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        has_begun = trainer.fit_loop.total_batch_idx >= 0
        if trainer.fast_dev_run or not has_begun:  # type: ignore[attr-defined]
            return
        self._position.end_training()
        self._save(trainer)
        wait_until_written(trainer)
        for other in self._sharing_callbacks(trainer):
            # Otherwise it would write the file again if training ends before its own first save.
            other._last_checkpoint_saved = str(self.directory / LAST)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Write the last checkpoint all the same if an earlier ``on_train_end`` has failed."""
        frames = (frame.f_code for frame, _ in traceback.walk_tb(exception.__traceback__))
        is_at_end = FitLoop.on_run_end.__code__ in frames
        if is_at_end and not self._position.is_at_end and as_rank_lost(exception) is None:
            self.on_train_end(trainer, pl_module)

    def _save(self, trainer: L.Trainer) -> None:
        start = time.monotonic()
        path = self.directory / f"step_{num_finished_steps(trainer):06d}.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            when_written(trainer, partial(self._kept.add, path))
        self._has_healthy = self._has_healthy or not trouble_of(trainer)
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - start
        self.longest_save = max(self.longest_save, self._save_seconds)
        trainer.strategy.barrier("Checkpoints")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        metrics = {
            name: float(trainer.callback_metrics[name])
            for name in (*SUMMARY, self.monitor)
            if name in trainer.callback_metrics and self._is_of_this_step(trainer, name)
        }
        checkpoint["summary"] = {
            "rollout_step": num_finished_steps(trainer),
            "optimizer_step": trainer.global_step,
            "time": now("milliseconds"),  # so that two of one second differ
            "trouble": trouble_of(trainer),
            "metrics": metrics,
        }
        self._position.correct(checkpoint["loops"], trainer)

    def _is_of_this_step(self, trainer: L.Trainer, name: str) -> bool:
        """Return whether a metric is finite and not left over from an earlier validation."""
        is_old = name.startswith("val/") and not self._position.has_validated(trainer)
        return not is_old and bool(trainer.callback_metrics[name].isfinite())

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def _sharing_callbacks(self, trainer: L.Trainer) -> list[ModelCheckpoint]:
        """Return the other callbacks that also write ``last.ckpt``."""
        return [
            other
            for other in trainer.checkpoint_callbacks
            if isinstance(other, ModelCheckpoint)
            and other.save_last
            and Path(other.dirpath or "").resolve() == self.directory.resolve()
        ]


def _log_step(trainer: L.Trainer, outputs: Any) -> None:
    """Write the step's row of ``metrics.csv``: Lightning logs it after the checkpoint.

    A kill in between would leave a run without it. The values are of Lightning's precision.
    """
    metrics = outputs.get("metrics") if isinstance(outputs, Mapping) else None
    for logger in trainer.loggers:
        if metrics and isinstance(logger, MetricsFile):
            values = {name: float(torch.tensor(value)) for name, value in metrics.items()}
            logger.log_metrics(values, step=trainer.fit_loop.total_batch_idx)


def trouble_of(trainer: L.Trainer) -> str:
    """Return what the module and callbacks with a ``trouble`` say; empty if the run is healthy."""
    asked = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    return "; ".join(filter(None, (getattr(one, "trouble", "") for one in asked)))
