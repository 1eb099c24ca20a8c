"""Check a training run before it starts, and validate the policy during it.

A validation that an engine, a reward or a callback cuts short ends the run, with a checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import Any, cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.data import TrainingLoader
from lit_grpo.distributed.ranks import any_failure
from lit_grpo.policy.files.loading import max_positions
from lit_grpo.policy.files.vocabulary import check_prompt_tokens
from lit_grpo.rollout import EngineFailed
from lit_grpo.stopping import (
    ExitCode,
    get_stop_reason,
    is_validation_unfinished,
    mark_unfinished_validation,
    stop_run,
)
from lit_grpo.training.checks.compatibility import (
    check_prompts_fit,
    log_if_endless,
    log_if_none_held_out,
    refuse_averages,
    refuse_other_loader,
    warn_without_validation,
)
from lit_grpo.training.checks.gathered_weights import report_gathering
from lit_grpo.training.checks.learning_rates import warn_of_learning_rate
from lit_grpo.training.checks.watched_metrics import check_monitors, warn_if_never_checked
from lit_grpo.training.collecting.checked_engine import load_weights
from lit_grpo.training.metrics import Metrics
from lit_grpo.training.optimizer.settings import apply_settings
from lit_grpo.training.resumable import ResumableModule
from lit_grpo.training.seeds import SeedPurpose
from lit_grpo.training.waiting import StepAbandoned
from lit_grpo.types import Prompt, StopReason, UserCodeFailed
from lit_grpo.types.errors import EngineBug

log = logging.getLogger(__name__)


class EvaluatedModule(ResumableModule):
    """Check and evaluate a policy that is trained. A subclass defines ``training_step``."""

    has_begun = False
    """Whether settings and data have been checked, and it trains or evaluates."""
    _is_checked = False
    _most_unscored: Mapping[str, float] = MappingProxyType({})
    """The largest shares of completions without a score so far, by their metrics."""

    def check_start(self) -> None:
        """Check the data, and what callbacks watch, before any callback of a training run begins.

        A resume that is refused here has changed no file of the run.

        Raises:
            UserError: something does not fit, or the data are not the resumed run's.
        """
        loader = cast(TrainingLoader, self.trainer.train_dataloader)
        refuse_other_loader(loader)
        self.check_loader(loader)
        check_prompt_tokens(self.policy.model.config, loader.some_prompts())
        self._compare("model", self.settings())
        self._compare("data", loader.settings())
        self._run_settings.add("model", self.changeable_settings(), may_change=True)
        val_loader = self._val_loader()
        if val_loader:
            refuse_other_loader(val_loader)
        rows = val_loader.settings().get("rows") if val_loader else None
        self.has_other_validation = self._run_settings.add_validation(rows)
        prompts = val_loader.some_prompts() if val_loader else []
        if not is_cut_short(self.trainer):  # by a signal while the model was loaded
            check_monitors(self, self.evaluation, prompts)
            self._warn_if_never_checked(has_validation=bool(prompts))
        if val_loader:
            check_prompts_fit(max_positions(self.policy.model.config), self.sampling, prompts)
            self.evaluation.check(prompts)
            refuse_averages(self.trainer, self.engine)
        self._log_changes()
        self._run_settings.forget()  # another training run may follow, of other data
        self._is_checked = self.has_begun = True

    def _warn_if_never_checked(self, *, has_validation: bool) -> None:
        max_steps = self.trainer.max_steps
        warn_if_never_checked(
            self.trainer,
            num_steps=self.num_batches(max_steps) if max_steps > 0 else math.inf,
            per_epoch=self.trainer.num_training_batches,
            has_validation=has_validation,
        )

    def on_train_start(self) -> None:
        if not self._is_checked:
            self.check_start()
        self._is_checked = False
        if self.trainer.ckpt_path is not None:
            configured, earlier = self._optimizer_settings, self._earlier_optimizer_settings
            is_new = self._has_other_optimizer
            apply_settings(self.trainer, configured, configured if is_new else earlier)
            rank_zero_only(log.info)(
                "resuming from %s after rollout step %d, optimizer step %d",
                *(self.trainer.ckpt_path, self.trainer.fit_loop.total_batch_idx + 1),
                self.global_step,
            )
        log_if_endless(self.trainer)
        warn_of_learning_rate(self.trainer, self)
        if self.engine.samples_with_policy:
            report_gathering(self.policy)
        loader = self._val_loader()
        if not loader:
            log_if_none_held_out(self.trainer)
            return
        if leaked := getattr(self.trainer.datamodule, "leaked", ""):  # type: ignore[attr-defined]
            rank_zero_only(log.warning)(leaked)
        self._log_coverage(loader)
        if self.trainer.max_steps > 0 and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            warn_without_validation(self.trainer, self.num_batches(self.trainer.max_steps))
        if self.evaluation.before_training and self.global_step == 0:
            self._evaluate_before_training(loader)

    def _log_coverage(self, val_loader: Any) -> None:
        """Log which sources of a mixture the accuracy leaves out."""
        loader = cast(TrainingLoader, self.trainer.train_dataloader)
        prompts = val_loader.some_prompts() if loader.sources else []
        if covered := self.evaluation.describe_coverage(prompts, loader.sources):
            rank_zero_only(log.info)(covered)

    def _val_loader(self) -> Any:
        """Return the loader of the validation prompts, empty if there are none.

        With ``check_val_every_n_epoch`` above 1 Lightning would make it later.
        """
        trainer = self.trainer
        if trainer.enable_validation and trainer.val_dataloaders is None:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True
        return trainer.val_dataloaders

    def _evaluate_before_training(self, loader: Iterable[Sequence[Prompt]]) -> None:
        num_batches = int(sum(self.trainer.num_val_batches))
        self.on_validation_epoch_start()
        with self.trainer.precision_plugin.val_step_context():
            for batch_idx, prompts in enumerate(islice(loader, num_batches)):
                self.validation_step(prompts, batch_idx)
        if is_cut_short(self.trainer):
            return
        metrics = self._val_metrics.merged()
        for logger in self.loggers:
            logger.log_metrics(metrics, step=getattr(logger, "step_before_training", 0))
        self._warn_of_unscored(metrics)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        rank_zero_only(log.info)("before training: %s", shown)

    def on_validation_epoch_start(self) -> None:
        self.has_begun = True
        self._val_metrics = Metrics()
        with stops_on_failure(self.trainer):
            load_weights(self.engine, self.policy, self.policy_version)

    def validation_step(self, prompts: Sequence[Prompt], batch_idx: int) -> None:
        if is_cut_short(self.trainer):
            mark_unfinished_validation(self.trainer)
            return
        seed = self.seeds.derive(SeedPurpose.EVALUATION, batch_idx)
        stage = self.events.stage("evaluation", progress=lambda: self.evaluation.progress())
        with stops_on_failure(self.trainer), stage, self.whole_policy():
            self.evaluation.add_metrics(
                self._val_metrics,
                self.engine,
                prompts,
                self.sampling,
                seed=seed,
                until_done=self._waiting.until_done,
            )

    def on_validation_epoch_end(self) -> None:
        # Without a scored completion log NaN: Lightning would select checkpoints by the last value.
        absent = dict.fromkeys(self.evaluation.accuracy_names, math.nan)
        is_cut_short = is_validation_unfinished(self.trainer)
        found = {} if is_cut_short else self._val_metrics.merged()
        self.log_dict(absent | found)
        self._warn_of_unscored(found)

    def _warn_of_unscored(self, metrics: Mapping[str, float]) -> None:
        """Warn of a validation that leaves out more of the completions than any before."""
        for accuracy, name in self.evaluation.unscored_names.items():
            fraction = metrics.get(name, 0.0)
            if not fraction > self._most_unscored.get(name, 0.0):
                continue
            self._most_unscored = {**self._most_unscored, name: fraction}
            effect = "leaves them out, and is wrong if they differ from the others"
            message = (
                f"{fraction:.0%} of the held-out completions could not be scored ({name}). "
                f"{accuracy} {'is not known' if fraction == 1 else effect}. The first failure of "
                "each kind is in run.log."
            )
            rank_zero_only(log.warning)(message)
            self.events.report_unscored(message)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        values = self._val_metrics.merged()
        self._warn_of_unscored(values)
        self.log_dict({name.replace("val/", "test/"): value for name, value in values.items()})


def is_cut_short(trainer: L.Trainer) -> bool:
    """Return whether the run ends before the validation that is running is finished."""
    return trainer.state.fn == "fit" and get_stop_reason(trainer) is not None


@contextmanager
def stops_on_failure(trainer: L.Trainer) -> Iterator[None]:
    """Stop with a checkpoint if a validation fails in training; otherwise raise the error.

    Every rank must enter this context.
    """
    failure: RuntimeError | None = None
    try:
        yield
    except StepAbandoned as abandoned:
        stop_run(trainer, abandoned.reason)
        mark_unfinished_validation(trainer)
        return
    except (EngineFailed, UserCodeFailed) as error:
        failure = error
    failure = any_failure(failure)
    if failure is None:
        return
    if trainer.state.fn != "fit" or trainer.global_step == 0 or trainer.sanity_checking:
        raise failure  # there is no training progress to save
    exit_code, cause = ExitCode.CRASHED, "reward_bug"
    if isinstance(failure, EngineFailed):
        exit_code, cause = ExitCode.ENGINE_FAILED, "engine_outage"
    elif isinstance(failure, EngineBug):
        cause = ""
    message = f"Stopped at an evaluation: {failure}"
    stop_run(trainer, StopReason(exit_code=exit_code, message=message, cause=cause))
    mark_unfinished_validation(trainer)
