"""Keep wandb from blocking or failing a run, when it starts, during training and when it ends.

Acts only if a WandbLogger is among the loggers, and does not import wandb itself.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from textwrap import shorten
from typing import Any

import lightning as L
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.concurrency import call_with_timeout
from lit_grpo.runs.files.events import record_event
from lit_grpo.stopping import ExitCode, exit_code_of_error, get_stop_reason, how_it_ended
from lit_grpo.types import check_range
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.paths import shown_path

log = logging.getLogger(__name__)

LOGGING_CALLS = ("log_metrics", "log_hyperparams", "log_graph", "save")
UPLOADING_CALLS = ("after_save_checkpoint", "finalize")
REASON_WIDTH = 200
DEFAULT_SAVE_DIR = "."
"""Lightning's default of the directory to which a WandbLogger writes."""


def write_into_run(logger: WandbLogger, run_dir: str | Path) -> None:
    """Let a logger write into the run directory, where ``lit-grpo wandb-sync`` looks for its data.

    A logger with a directory other than Lightning's default keeps it.
    """
    if logger._save_dir == DEFAULT_SAVE_DIR:
        logger._save_dir = logger._wandb_init["dir"] = str(run_dir)


@checks_keywords
@checks_types
class WandbTeardown(Callback):
    """Give every wandb call a timeout, and continue without wandb after the first failure.

    If wandb cannot start, since it has no login or cannot reach its server, it logs offline.
    After training and the last checkpoint, finish the wandb run with the exit code of the run, so
    that wandb shows whether it is done, and with the reason in the summary as ``stop_reason``. Data
    that could not be sent stays in wandb's local directory for ``lit-grpo wandb-sync``.

    Args:
        timeout_seconds: Timeout of a call that logs, and of finishing the wandb run.
        upload_timeout_seconds: Timeout of a call that may copy a checkpoint (``log_model``).
        start_timeout_seconds: Timeout of the start of wandb, its login included.

    Raises:
        UserError: a timeout is not positive.
    """

    def __init__(
        self,
        timeout_seconds: float = 10.0,
        upload_timeout_seconds: float = 600.0,
        start_timeout_seconds: float = 60.0,
    ) -> None:
        key = "WandbTeardown.init_args."
        check_range(f"{key}timeout_seconds", timeout_seconds, above=0)
        check_range(f"{key}upload_timeout_seconds", upload_timeout_seconds, above=0)
        check_range(f"{key}start_timeout_seconds", start_timeout_seconds, above=0)
        self.timeout_seconds = timeout_seconds
        self.upload_timeout_seconds = upload_timeout_seconds
        self.start_timeout_seconds = start_timeout_seconds
        self.hung = False
        """Whether a call timed out."""
        self._failed = False
        self._loggers: list[WandbLogger] = []
        self._run_dir = ""
        self._unreported = ""
        """The warning that is not an event of the run yet."""

    def guard_start(self, logger: WandbLogger, run_dir: str | Path) -> None:
        """Let the run continue if wandb cannot start; call it before the training.

        Lightning starts wandb by reading ``logger.experiment``, before any hook of a callback.
        """
        kind: Any = type(logger)
        start = partial(self._start, kind=kind, run_dir=run_dir)

        class Guarded(kind):  # type: ignore[misc]
            @property
            def experiment(self) -> Any:
                if getattr(rank_zero_only, "rank", 0) == 0 and self._experiment is None:
                    self._experiment: Any = start(self)
                return super().experiment

        logger.__class__ = Guarded

    def _start(self, logger: WandbLogger, *, kind: Any, run_dir: str | Path) -> Any:
        """Return a new run of wandb, an offline one if that fails, or one that drops everything."""

        def start(mode: dict[str, str]) -> Any:
            # A copy, since a start that is given up may end later; copy.copy() would start wandb.
            attempt = object.__new__(kind)
            attempt.__dict__ |= logger.__dict__ | {"_wandb_init": logger._wandb_init | mode}
            return call_with_timeout(
                lambda: attempt.experiment, self.start_timeout_seconds, "wandb"
            )

        try:
            return start({})
        except Exception as error:
            why = f"wandb could not start ({type(error).__name__}: {error})"
        try:
            offline = start({"mode": "offline"})
        except Exception as error:
            self._failed = True
            self._warn(
                f"{why}, nor offline ({type(error).__name__}: {error}); the run continues without "
                "it. All metrics are in the run directory."
            )
            nothing: Any = _DummyExperiment()
            nothing.id = nothing.name = None
            return nothing
        self._warn(
            f"{why}; the run goes on, and wandb logs offline. Check the network and the login "
            "(`wandb login`, or WANDB_API_KEY), and send its data with `lit-grpo wandb-sync "
            f"{shlex.quote(str(run_dir))}`."
        )
        return offline

    def _warn(self, message: str) -> None:
        log.warning("%s", message)
        self._unreported = message

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Record what has failed, also before the training began, as an event."""
        if self._unreported:
            record_event(trainer, "warning", self._unreported, "wandb_failed")
            self._unreported = ""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._run_dir = trainer.default_root_dir
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
            run_dir = shlex.quote(shown_path(Path(self._run_dir)))
            self._warn(
                f"wandb failed in {name} ({type(error).__name__}: {error}); the run continues "
                "without it. All metrics are in the run directory. Send the rest of wandb's data "
                f"with `lit-grpo wandb-sync {run_dir} --include_online`."
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
