"""Keep wandb from blocking or failing a run, during training and when it ends.

Acts only if a WandbLogger is among the loggers, and does not import wandb itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from textwrap import shorten
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.concurrency import call_with_timeout
from lit_grpo.stopping import ExitCode, exit_code_of_error, get_stop_reason, how_it_ended

log = logging.getLogger(__name__)

LOGGING_CALLS = ("log_metrics", "log_hyperparams", "log_graph", "save")
UPLOADING_CALLS = ("after_save_checkpoint", "finalize")
REASON_WIDTH = 200


class WandbTeardown(Callback):
    """Give every wandb call a timeout, and continue without wandb after the first failure.

    After training and the last checkpoint, finish the wandb run with the exit code of the run, so
    that wandb shows whether it is done, and with the reason in the summary as ``stop_reason``. Data
    that could not be sent stays in wandb's local directory for ``lit-grpo wandb-sync``.

    Args:
        timeout_seconds: Timeout of a call that logs, and of finishing the wandb run.
        upload_timeout_seconds: Timeout of a call that may copy a checkpoint (``log_model``).
    """

    def __init__(
        self, timeout_seconds: float = 10.0, upload_timeout_seconds: float = 600.0
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.upload_timeout_seconds = upload_timeout_seconds
        self.hung = False
        """Whether a call timed out."""
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
        except Exception as error:  # no failure of wandb may end the run
            self._failed = True
            self.hung = isinstance(error, TimeoutError)
            log.warning(
                "wandb failed in %s (%s: %s); the run continues without it. All metrics are in the "
                "run directory. Send the rest of wandb's data with `lit-grpo wandb-sync RUN "
                "--include_online`.",
                name,
                type(error).__name__,
                error,
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            reason = get_stop_reason(trainer)
            exit_code = reason.exit_code if reason else ExitCode.DONE
            self._finish("success", exit_code, how_it_ended(trainer))

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        reason = f"{type(exception).__name__}: {exception}"
        self._finish("failed", exit_code_of_error(exception), reason)

    @rank_zero_only
    def _finish(self, status: str, exit_code: int, reason: str) -> None:
        for logger in self._loggers:
            logger.finalize(status)

            def finish(logger: WandbLogger = logger) -> None:
                logger.experiment.summary["stop_reason"] = shorten(reason, REASON_WIDTH)
                logger.experiment.finish(exit_code=int(exit_code))

            self._attempt(finish, "finish", self.timeout_seconds)
        if self._failed and (wandb := sys.modules.get("wandb")) is not None:
            # Otherwise wandb's exit hook would print a traceback, or wait for a service that hangs.
            with suppress(Exception):
                tear_down = partial(wandb.teardown, int(exit_code))
                call_with_timeout(tear_down, self.timeout_seconds, "wandb")
