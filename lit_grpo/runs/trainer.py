"""The trainer for scripts and notebooks, `lit_grpo.Trainer`: it writes the files of a run.

The command line builds its trainer from the same parts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, cast

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger

from lit_grpo.distributed.supported import supported_strategy
from lit_grpo.runs.checkpoints.resume import find_checkpoint
from lit_grpo.runs.checkpoints.resume_checks import check_checkpoint_fits, check_run_dir_is_new
from lit_grpo.runs.launcher import is_repeated
from lit_grpo.runs.reuse import claim_for_run, mark_as_trained, refuse_trained
from lit_grpo.runs.run_callbacks import (
    as_list,
    has_lightnings_checkpoints,
    run_callbacks,
    run_loggers,
)
from lit_grpo.runs.run_log import logged_run, silence_chatter
from lit_grpo.runs.shutdown.resume_hint import RESUME_CALL
from lit_grpo.runs.trainer_settings import (
    TRAINER_DEFAULTS,
    check_arguments,
    check_counts,
    check_intervals,
    check_max_time,
    check_module,
    check_plugins,
    check_root,
    refuse_barebones,
    refuse_float16,
    refuse_missing_gpu,
    rewording_notebook_error,
)
from lit_grpo.stopping import ExitCode, exit_code_of_error
from lit_grpo.types import StopReason, UserError, setting_error
from lit_grpo.types.errors import keeping_interrupts
from lit_grpo.types.field_types import check_init
from lit_grpo.types.keywords import refuse_unknown
from lit_grpo.types.paths import at_home, check_run_dir
from lit_grpo.types.settings import check_type

log = logging.getLogger(__name__)


class Trainer(L.Trainer):
    """Train a ``GRPOModule`` or ``SFTModule`` from Python, like ``lit-grpo fit`` and ``sft``.

    ``fit`` writes ``metrics.csv``, ``completions/``, ``run.log``, ``final/`` and, to resume from,
    ``checkpoints/`` into ``run_dir``.
    Errors are raised. A stop is not an error, even one because of a bug in a reward: ``fit`` writes
    a checkpoint and returns, and ``stop_reason`` says why. After either, ``exit_code`` is not 0.
    A run that Lightning's ``EarlyStopping`` or ``should_stop`` ends is done, and is not a stop.
    Only the command line writes ``config.yaml``.

    Args:
        run_dir: Directory of all files. One that holds a run is refused unless ``fit`` resumes it.
        logger: Further loggers.
        callbacks: Further callbacks.
        enable_progress_bar: False shows none; otherwise there is a ``RolloutProgressBar`` unless
            ``callbacks`` has another.
        leave_by: As in ``StopAtTimeLimit``.
        requeue: As in ``StopAtTimeLimit``.
        settings: As for ``lightning.Trainer``.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        logger: Logger | list[Logger] | None = None,
        callbacks: Callback | list[Callback] | None = None,
        enable_progress_bar: bool | None = None,
        leave_by: str = "auto",
        requeue: bool = False,
        **settings: Any,
    ) -> None:
        silence_chatter()
        known = {**signature(L.Trainer).parameters, **signature(Trainer).parameters}
        refuse_unknown("Trainer", settings, known.keys() - {"settings"})
        refuse_float16(settings.get("precision"))
        check_max_time(settings.get("max_time"))
        check_type("run_dir", run_dir, (str, Path))
        check_plugins("callbacks", as_list(callbacks), Callback)
        check_plugins("logger", as_list(logger), Logger)
        check_init("trainer", L.Trainer, settings)
        if (strategy := settings.get("strategy")) is not None:
            supported_strategy(strategy)
        refuse_missing_gpu(settings.get("accelerator"))
        check_counts(settings)
        refuse_barebones(settings.get("barebones"))
        check_intervals(
            settings.get("val_check_interval"), settings.get("check_val_every_n_epoch", 1)
        )
        check_run_dir(run_dir)
        self.run_dir = Path(at_home(run_dir)).absolute()  # a notebook may change directories
        if self.run_dir.is_file():
            raise setting_error("run_dir", "a directory", run_dir, "it is a file")
        self._given: list[Callback | Logger] = [*as_list(callbacks), *as_list(logger)]
        check_root(settings.pop("default_root_dir", None), self.run_dir)
        claim_for_run(self._given, self.run_dir)
        loggers = run_loggers(self.run_dir, logger)
        of_run = run_callbacks(
            self.run_dir,
            callbacks,
            loggers=loggers,
            enable_progress_bar=enable_progress_bar,
            enable_checkpointing=settings.pop("enable_checkpointing", None),
            leave_by=leave_by,
            requeue=requeue,
        )
        with rewording_notebook_error(settings):
            super().__init__(
                logger=loggers,
                callbacks=of_run,
                enable_progress_bar=enable_progress_bar,
                enable_checkpointing=has_lightnings_checkpoints(callbacks),
                **{"default_root_dir": str(self.run_dir), **TRAINER_DEFAULTS, **settings},
            )

    stop_reason: StopReason | None = None
    """Why a callback or the step itself stopped the run; None if it was not stopped."""

    @property
    def exit_code(self) -> int:
        """The exit code that ``lit-grpo fit`` would return after this training; 0 if it is done.

        An error that ``fit`` has raised has its own code, whatever the run was about to end with.
        """
        if self._code_of_error is not None:
            return self._code_of_error
        return int(ExitCode.DONE if self.stop_reason is None else self.stop_reason.exit_code)

    _code_of_error: int | None = None

    def fit(  # type: ignore[override]
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule | None = None,
        *more: Any,
        ckpt_path: str | Path | None = None,
        allow_changes: bool = False,
        **others: Any,
    ) -> None:
        """Train, and close the engine and the rewards at the end.

        Args:
            ckpt_path: Checkpoint to resume from, ``last`` for the newest one in ``run_dir``,
                ``auto`` for that one if there is any, or ``best`` for the best by the monitor of a
                callback.
            allow_changes: Let the settings or the data of a resumed run change from here on, which
                makes it a different run.

        Raises:
            UserError: ``run_dir`` already holds a run, or there is no such checkpoint, or it has
                gone further than the run may, or was trained with other settings or data.
            EngineFailed: the engine cannot start, or gives up before the first step.
        """
        if more:
            self._refuse_more(model, more)
        refuse_unknown("Trainer.fit", others, ("model", "datamodule", "ckpt_path", "allow_changes"))
        self._code_of_error = None
        try:
            self._fit(model, datamodule, ckpt_path, allow_changes)
        except BaseException as error:
            self._code_of_error = int(exit_code_of_error(error))
            raise

    def _fit(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule | None,
        ckpt_path: str | Path | None,
        allow_changes: bool,
    ) -> None:
        check_arguments("fit", model, datamodule)
        if self.world_size == 1 and is_repeated(self.run_dir, may_be_done=ckpt_path == "auto"):
            return
        if ckpt_path is None and self.global_rank == 0:
            check_run_dir_is_new(self.run_dir, RESUME_CALL)
        ckpt_path = self._find(ckpt_path)
        if ckpt_path is None:
            refuse_trained(model, self._given)
        if ckpt_path is not None:
            check_checkpoint_fits(
                ckpt_path,
                is_grpo=not model.automatic_optimization,
                max_steps=self.max_steps,
                max_epochs=self.max_epochs,
            )
        model.allow_changes = allow_changes  # type: ignore[assignment]
        model.changes = ()  # type: ignore[assignment]  # an earlier resume's were reported
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.stop_reason = None
        set_by_stop = {
            name: getattr(self, name) for name in ("limit_val_batches", "log_every_n_steps")
        }
        minima = self.fit_loop.min_epochs, self.fit_loop.epoch_loop.min_steps
        try:
            model.check_trainer(self)  # type: ignore[operator]
            with logged_run(self, self.run_dir, RESUME_CALL), keeping_interrupts():
                super().fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
        finally:
            vars(self).update(set_by_stop)  # a stop has set them to 0, and lifted the minima
            self.fit_loop.min_epochs, self.fit_loop.epoch_loop.min_steps = minima
            if self.global_step and not self.fast_dev_run:  # type: ignore[attr-defined]
                mark_as_trained(model, self._given, self.run_dir)
            model.close()  # type: ignore[operator]

    def validate(  # type: ignore[override]
        self,
        model: L.LightningModule | None = None,
        datamodule: L.LightningDataModule | None = None,
        **settings: Any,
    ) -> Any:
        """Evaluate on the validation prompts; write nothing into ``run_dir``.

        Args:
            model: After ``fit``, None for the module that it has trained.
            datamodule: After ``fit``, None for its data.
            settings: As for ``lightning.Trainer``. ``ckpt_path`` is as in ``fit``; without it the
                weights of the module count.

        Raises:
            UserError: there is no such checkpoint.
        """
        model, datamodule = self._evaluated("validate", model, datamodule)
        settings["ckpt_path"] = self._find(settings.get("ckpt_path"), is_evaluated=True)
        with keeping_interrupts():
            return super().validate(model, datamodule=datamodule, **settings)

    def test(  # type: ignore[override]
        self,
        model: L.LightningModule | None = None,
        datamodule: L.LightningDataModule | None = None,
        **settings: Any,
    ) -> Any:
        """Evaluate on the test prompts, like ``validate`` on the validation prompts."""
        model, datamodule = self._evaluated("test", model, datamodule)
        settings["ckpt_path"] = self._find(settings.get("ckpt_path"), is_evaluated=True)
        with keeping_interrupts():
            return super().test(model, datamodule=datamodule, **settings)

    def predict(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a policy is evaluated by ``validate`` and ``test``.

        Raises:
            UserError: always.
        """
        raise UserError(
            "predict is not supported. Call validate or test, which sample and score completions, "
            "or sample from the final model: AutoModelForCausalLM.from_pretrained(RUN/final)."
        )

    def _refuse_more(self, model: L.LightningModule, more: Sequence[Any]) -> NoReturn:
        """Refuse what Lightning's `fit` takes after the data, as its `Tuner` calls it.

        Raises:
            UserError: always.
        """
        check_module("fit", model)
        given = self.callbacks  # type: ignore[has-type]
        try:
            model.check_trainer(self)  # type: ignore[operator]
        finally:  # the Tuner has put one there, and leaves it when it fails
            self.callbacks = [one for one in given if not getattr(one, "_early_exit", False)]
        raise UserError(
            f"fit takes a module and data, got {len(more)} more. Pass ckpt_path by its name. "
            "Prompts to train and to evaluate on go into one PromptData(train=…, validation=…)."
        )

    def _evaluated(
        self,
        call: str,
        model: L.LightningModule | None,
        datamodule: L.LightningDataModule | None,
    ) -> tuple[L.LightningModule, L.LightningDataModule]:
        """Return the arguments of a call, those of ``fit`` if it has none."""
        model = model or self.lightning_module
        datamodule = datamodule or getattr(self, "datamodule", None)
        check_arguments(call, model, datamodule)
        return model, cast(L.LightningDataModule, datamodule)

    def _find(self, ckpt_path: str | Path | None, *, is_evaluated: bool = False) -> str | None:
        if ckpt_path is None:
            return None
        check_type("ckpt_path", ckpt_path, (str, Path))
        return find_checkpoint(at_home(ckpt_path), self.run_dir, is_evaluated=is_evaluated)
