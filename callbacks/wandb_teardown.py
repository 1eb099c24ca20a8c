"""Keeps wandb from stopping a run: not while it trains, not when it ends.

Acts only where a WandbLogger is among the loggers, and imports nothing of wandb itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from lit_grpo.concurrency import call_with_timeout
from lit_grpo.stopping import get_stop_reason

log = logging.getLogger(__name__)

LOGGING_CALLS = ("log_metrics", "log_hyperparams", "log_graph", "save")
UPLOADING_CALLS = ("after_save_checkpoint", "finalize")


class WandbTeardown(Callback):
    """Bounds every call to wandb in time, goes on without it after the first failure, ends it last.

    Once training and all saves are done it finishes the wandb run with the exit code of the run.
    What wandb could not send stays in its local directory for ``wandb sync``.

    Args:
        timeout_seconds: Of a call that logs, and of ending the wandb run.
        upload_timeout_seconds: Of a call that may copy a checkpoint (``log_model``).
    """

    def __init__(
        self, timeout_seconds: float = 10.0, upload_timeout_seconds: float = 600.0
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.upload_timeout_seconds = upload_timeout_seconds
        self.hung = False
        """Whether a call did not come back: wandb's own exit hook would wait for good, too."""
        self._failed = False
        self._loggers: list[WandbLogger] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and logger not in self._loggers:
                self._loggers.append(logger)
                for name in LOGGING_CALLS:
                    self._guard(logger, name, self.timeout_seconds)
                for name in UPLOADING_CALLS:
                    self._guard(logger, name, self.upload_timeout_seconds)

    def _guard(self, logger: WandbLogger, name: str, timeout_seconds: float) -> None:
        call = getattr(logger, name)

        @wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> None:
            self._attempt(lambda: call(*args, **kwargs), name, timeout_seconds)

        setattr(logger, name, guarded)

    def _attempt(self, call: Callable[[], Any], name: str, timeout_seconds: float) -> None:
        if self._failed:
            return
        try:
            call_with_timeout(call, timeout_seconds, "wandb")
        except Exception as error:  # whatever wandb does, the run goes on
            self._failed = True
            self.hung = isinstance(error, TimeoutError)
            log.warning(
                "wandb failed in %s (%s: %s); the run goes on without it. All metrics are in the "
                "run directory; send wandb's part later with `wandb sync`.",
                name,
                type(error).__name__,
                error,
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            reason = get_stop_reason(trainer)
            self._finish("success", reason.exit_code if reason else 0)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._finish("failed", 1)

    def _finish(self, status: str, exit_code: int) -> None:
        for logger in self._loggers:
            logger.finalize(status)

            def finish(logger: WandbLogger = logger) -> None:
                logger.experiment.finish(exit_code=exit_code)

            self._attempt(finish, "finish", self.timeout_seconds)
