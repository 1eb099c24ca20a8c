"""The base class of GRPO and SFT: policy, optimizer, evaluation, checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase, get_scheduler

from lit_grpo.data import TrainingLoader
from lit_grpo.distributed import get_world_size
from lit_grpo.distributed.checkpoints import check_partition
from lit_grpo.policy import Policy
from lit_grpo.policy.loading import max_positions
from lit_grpo.policy.model_source import ModelSource, refuse_changed, save_sources
from lit_grpo.policy.sharding import WHOLE, Sharding, T, is_divided, refused_passes
from lit_grpo.rewards.scoring import Reasoning
from lit_grpo.rollout import HFEngine, RolloutEngine, Sampling
from lit_grpo.training.checks.compatibility import (
    check_completions_fit,
    say_if_endless,
    undeclared_passes,
    warn_of_learning_rate,
    warn_without_validation,
)
from lit_grpo.training.checks.gathering import report_gathering
from lit_grpo.training.checks.monitors import check_monitors, warn_of_unlogged
from lit_grpo.training.checks.same_run import (
    RunSettings,
    plain_settings,
    refuse_other_policy,
)
from lit_grpo.training.checks.strategies import (
    check_updates,
    is_zero_3,
    refuse_compiled,
    refuse_unsupported,
    warn_of_casts,
)
from lit_grpo.training.collecting.generation import close_engine, load_weights, start_engine
from lit_grpo.training.evaluation import Evaluation
from lit_grpo.training.metrics import Metrics
from lit_grpo.training.optimizer.fused_steps import choose_fused
from lit_grpo.training.optimizer.learning_rate import scale_learning_rate
from lit_grpo.training.optimizer.settings import apply_settings, configured_settings
from lit_grpo.training.seeds import SeedPurpose, Seeds, seed_everything
from lit_grpo.training.stages import StageEvents
from lit_grpo.training.validation import is_cut_short, stops_on_failure
from lit_grpo.training.waiting import Waiting
from lit_grpo.types import (
    Prompt,
    UserError,
    check_range,
    check_type,
    check_value,
    setting_error,
)

log = logging.getLogger(__name__)

Schedule = Literal["constant", "linear", "cosine"]


class PolicyModule(L.LightningModule):
    """Train and evaluate a policy.

    A subclass defines ``training_step``. Arguments are as in ``GRPOModule``.
    """

    def __init__(
        self,
        policy: Policy,
        sampling: Sampling,
        engine: RolloutEngine | None,
        optimizer: OptimizerCallable,
        lr_schedule: Schedule,
        warmup_steps: int,
        evaluation: Evaluation | None,
        seed: int,
    ) -> None:
        super().__init__()
        self.policy = Policy(policy) if isinstance(policy, str) else policy
        check_type("model.policy", self.policy, Policy)
        check_type("model.sampling", sampling, Sampling)
        self.sampling = sampling
        self.engine = engine or HFEngine()
        check_type("model.engine", self.engine, RolloutEngine)
        if not callable(optimizer):
            raise setting_error(
                "model.optimizer",
                "a function that makes an optimizer of parameters, such as "
                "functools.partial(torch.optim.AdamW, lr=1e-5)",
                repr(optimizer),
            )
        self.make_optimizer = optimizer
        self.lr_schedule = lr_schedule
        self.warmup_steps = warmup_steps
        self.evaluation = evaluation or Evaluation()
        check_type("model.evaluation", self.evaluation, Evaluation)
        check_value("model.lr_schedule", lr_schedule, Schedule)
        check_value("model.warmup_steps", warmup_steps, int)
        check_range("model.warmup_steps", warmup_steps, at_least=0)
        check_type("model.seed", seed, int)
        check_range("model.seed", seed, at_least=0)
        self.seed = seed
        self.num_rollbacks = 0
        """Number of times that the weights were replaced by earlier ones."""
        self._optimizer_settings: list[dict[str, Any]] = []
        self._is_checked = False
        self._run_settings = RunSettings()
        self.events = StageEvents(self)
        self._waiting = Waiting(self.events)
        self._has_logged = False

    needs_reference = False
    refreshes_reference = False
    has_other_validation = False
    """Whether a resumed run is validated on other rows than before."""
    trained_in: Path | None = None
    """The directory of the run that has trained this module."""
    allow_changes = False
    """Whether a resumed run may have other settings or data than the one before."""

    def forward(self, function: Callable[[], T]) -> T:
        """Call a function; a strategy that wraps the module provides its weights meanwhile."""
        return function()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.policy.tokenizer

    @property
    def policy_version(self) -> int:
        """The version of the weights: grows with every change of them."""
        return self.global_step + self.num_rollbacks

    @property
    def reasoning(self) -> Reasoning | None:
        """How the policy marks its reasoning; None if it does not."""
        tags = self.policy.reasoning_tags
        return None if tags is None else Reasoning(*tags, self.tokenizer)

    def configure_model(self) -> None:
        rank_zero_only(log.info)("loading the model %s", self.policy.path or "with random weights")
        seed_everything(self.seed)  # random initial weights must be the same on all ranks
        self.load_models()
        check_completions_fit(max_positions(self.policy.model.config), self.sampling)
        start_engine(self.engine, self.policy)

    @property
    def _sharding(self) -> Sharding:
        """How the strategy shards models; not at all without a trainer."""
        strategy = None if self._trainer is None else self.trainer.strategy
        sharding: Sharding = getattr(strategy, "sharding", WHOLE)
        return sharding

    def load_models(self) -> None:
        """Load what this training needs, before an engine takes its share of the memory."""
        self.policy.load(
            with_reference=self.needs_reference,
            refreshes_reference=self.refreshes_reference,
            sharding=self._sharding,
        )

    def setup(self, stage: str) -> None:
        refuse_unsupported(self.trainer)
        compiles = self.policy.compile_forward
        refuse_compiled(compiles=compiles, is_zero_3=is_zero_3(self.trainer.strategy))
        samples_with_policy = self.engine.samples_with_policy
        warn_of_casts(self.policy, self.trainer, samples_with_policy=samples_with_policy)
        self.engine.check_processes(self.trainer.world_size, self.trainer.num_nodes)
        self.engine.precision = self.trainer.precision
        self.engine.on_wait = self._waiting.take_part
        self.evaluation.suite.start(self.reasoning)

    def teardown(self, stage: str) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine and the rewards; Lightning skips ``teardown`` when a run fails."""
        close_engine(self.engine)
        self.evaluation.suite.close()

    def configure_optimizers(self) -> Any:
        optimizer = self.build_optimizer(self.policy.trainable_parameters())
        check_updates(optimizer, type(self.trainer.strategy), get_world_size())
        if self.lr_schedule == "constant":
            schedule = get_scheduler("constant_with_warmup", optimizer, self.warmup_steps)
        else:
            num_steps = self.num_optimizer_steps()
            schedule = get_scheduler(self.lr_schedule, optimizer, self.warmup_steps, num_steps)
        scale_learning_rate(schedule, getattr(self.trainer, "datamodule", None))
        self._optimizer_settings = configured_settings(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def build_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer of the config.

        Raises:
            UserError: it cannot be made.
        """
        try:
            return choose_fused(self.make_optimizer(parameters))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"optimizer must be one that can be made ({error}). Set model.optimizer."
            ) from error

    def num_optimizer_steps(self) -> int:
        """Return the optimizer steps of the whole run, for the schedule.

        Raises:
            UserError: neither ``trainer.max_steps`` nor ``trainer.max_epochs`` is set.
        """
        trainer = self.trainer
        if trainer.max_steps >= 0:
            return trainer.max_steps
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            raise UserError(
                f"the run has no end, so its {self.lr_schedule} schedule has no length. "
                "Set trainer.max_steps or trainer.max_epochs, or model.lr_schedule to constant."
            )
        trainer.fit_loop.setup_data()
        per_epoch = self.optimizer_steps_per_epoch(int(trainer.num_training_batches))
        return per_epoch * trainer.max_epochs

    def optimizer_steps_per_epoch(self, num_batches: int) -> int:
        """Return the optimizer steps of one epoch; its last batch always ends with one."""
        return ceil(num_batches / self.trainer.accumulate_grad_batches)

    def num_batches(self, optimizer_steps: int) -> int:
        """Return the rollout steps (for SFT: batches) that take this many optimizer steps."""
        accumulated = self.trainer.accumulate_grad_batches
        return ceil(optimizer_steps / self.optimizer_steps_per_epoch(accumulated)) * accumulated

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Return the prompts unchanged; the tensors made from them are moved later."""
        return batch

    @property
    def seeds(self) -> Seeds:
        """The seeds of this run on this rank."""
        return Seeds(self.seed, self.global_rank)

    def check_loader(self, loader: TrainingLoader) -> None:
        """Check that the training can use what the loader does; raise UserError if not."""
        self.evaluation.suite.check_only_sources(loader.sources)

    def settings(self) -> dict[str, Any]:
        """Return what decides what is learned, as plain values by their keys."""
        return plain_settings(self, ("seed",)) | {
            f"policy.{name}": value
            for name, value in plain_settings(self.policy, ("dtype", "lora")).items()
        }

    def check_start(self) -> None:
        """Check the data, and what callbacks watch, before any callback of a training begins.

        A resume that is refused here has changed no file of the run.

        Raises:
            UserError: something does not fit, or the data are not those of the resumed run.
        """
        loader = cast(TrainingLoader, self.trainer.train_dataloader)
        self.check_loader(loader)
        self._compare("model", self.settings())
        self._compare("data", loader.settings())
        val_loader = self._val_loader()
        rows = val_loader.settings().get("rows") if val_loader else None
        self.has_other_validation = self._run_settings.add_validation(rows)
        prompts = val_loader.some_prompts() if val_loader else []
        if not is_cut_short(self.trainer):  # by a signal while the model was loaded
            check_monitors(self, self.evaluation, prompts)
        if val_loader:
            self.evaluation.check(prompts)
        self._run_settings.before = {}  # another training may follow, of other data
        self._is_checked = True

    def _compare(self, section: str, settings: Mapping[str, Any]) -> None:
        self._run_settings.add(section, settings, may_change=self.allow_changes)

    def on_train_start(self) -> None:
        if not self._is_checked:
            self.check_start()
        self._is_checked = False
        if self.trainer.ckpt_path is not None:
            apply_settings(self.trainer, self._optimizer_settings, self._earlier_optimizer_settings)
            rank_zero_only(log.info)(
                "resuming from %s after rollout step %d, optimizer step %d",
                *(self.trainer.ckpt_path, self.trainer.fit_loop.total_batch_idx + 1),
                self.global_step,
            )
        say_if_endless(self.trainer)
        warn_of_learning_rate(self.trainer, self.warmup_steps)
        if self.engine.samples_with_policy:
            report_gathering(self.policy)
        loader = self._val_loader()
        if not loader:
            return
        if leaked := getattr(self.trainer.datamodule, "leaked", ""):  # type: ignore[attr-defined]
            rank_zero_only(log.warning)(leaked)
        if self.trainer.max_steps > 0 and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            warn_without_validation(self.trainer, self.num_batches(self.trainer.max_steps))
        if self.evaluation.before_training and self.global_step == 0:
            self._evaluate_before_training(loader)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._has_logged:
            warn_of_unlogged(self.trainer)
        self._has_logged = True

    def whole_policy(self) -> AbstractContextManager[None]:
        """Keep a sharded policy whole within the context, if the engine samples with it.

        An engine that does so without saying it is refused at its first pass: ranks that make
        unlike numbers of passes would wait for each other, or mix up their weights.
        """
        model = self.policy.model
        if self.engine.samples_with_policy:
            return self.policy.sharding.gathered(model)
        if is_divided(model):
            return refused_passes(model, undeclared_passes(self.engine))
        return nullcontext()

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
        shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        rank_zero_only(log.info)("before training: %s", shown)

    def on_validation_epoch_start(self) -> None:
        self._val_metrics = Metrics()
        with stops_on_failure(self.trainer):
            load_weights(self.engine, self.policy, self.policy_version)

    def validation_step(self, prompts: Sequence[Prompt], batch_idx: int) -> None:
        if is_cut_short(self.trainer):
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
        self.log_dict(absent | ({} if is_cut_short(self.trainer) else self._val_metrics.merged()))

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        values = self._val_metrics.merged()
        self.log_dict({name.replace("val/", "test/"): value for name, value in values.items()})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_settings"] = self._optimizer_settings
        checkpoint["run_settings"] = self._run_settings.now
        save_sources(checkpoint, self._sources())
        weights, reloaded = checkpoint["state_dict"], self._reloaded_names()
        checkpoint["state_dict"] = {k: v for k, v in weights.items() if k not in reloaded}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if is_fit := self._trainer is not None and self.trainer.state.fn == "fit":
            own = getattr(self.trainer.strategy, "partition", None)
            check_partition(checkpoint, own, self.trainer.ckpt_path)
        refuse_other_policy(self, checkpoint["state_dict"], self._reloaded_names())
        if is_fit or self.policy.lora is not None:
            refuse_changed(checkpoint, self._sources(), may_be_others=self.allow_changes)
        self.strict_loading = not self._reloaded_names()
        self._earlier_optimizer_settings = checkpoint["optimizer_settings"]
        if is_fit:
            self._run_settings.before = checkpoint.get("run_settings", {})
            self._compare("model", self.settings())

    def _sources(self) -> dict[str, ModelSource]:
        """Return, by its key, each model that was read from a path."""
        if (source := self.policy.loaded_from) is None:
            return {}
        is_read_again = bool(self._reloaded_names())
        return {"model.policy.path": replace(source, is_read_again=is_read_again)}

    def _reloaded_names(self) -> set[str]:
        """Return the parameters that a resumed run reads from ``policy.path`` again.

        They are the frozen base of an adapter, or a reference that never moves.
        """
        if self.policy.path is None or (self.policy.lora is None and self.refreshes_reference):
            return set()
        # The state dict contains tied weights under each of their names.
        named = self.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if not parameter.requires_grad}
