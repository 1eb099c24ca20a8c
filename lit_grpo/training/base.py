"""Base of GRPO and SFT: a policy, with the engine that samples from it and its optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from math import ceil
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from lit_grpo.data import TrainingLoader
from lit_grpo.distributed.optimizer_class import optimizer_class
from lit_grpo.distributed.ranks import get_world_size
from lit_grpo.policy import Policy
from lit_grpo.policy.files.loading import max_positions
from lit_grpo.policy.policy import PolicyOrPath
from lit_grpo.policy.sharding import UNSHARDED, Sharding, T, is_divided, refused_passes
from lit_grpo.rewards.scoring.reasoning import Reasoning
from lit_grpo.rollout import HFEngine, RolloutEngine, Sampling
from lit_grpo.rollout.requests import stop_token_ids
from lit_grpo.stopping import begin_without_stop, log_stop
from lit_grpo.training.checks.compatibility import check_completions_fit, undeclared_passes
from lit_grpo.training.checks.resume_changes import RunSettings
from lit_grpo.training.checks.strategies import (
    check_updates,
    refuse_unsupported,
    warn_of_casts,
)
from lit_grpo.training.checks.trainer_features import refuse_automatic
from lit_grpo.training.checks.watched_metrics import warn_of_unlogged
from lit_grpo.training.collecting.checked_engine import close_engine, start_engine
from lit_grpo.training.evaluation import Evaluation
from lit_grpo.training.optimizer.building import built_by, check_function
from lit_grpo.training.optimizer.fused_steps import choose_fused
from lit_grpo.training.optimizer.learning_rate import (
    Schedule,
    build_schedule,
    scale_learning_rate,
)
from lit_grpo.training.optimizer.settings import configured_settings, use_plain_numbers
from lit_grpo.training.seeds import Seeds, seed_everything
from lit_grpo.training.stages import StageEvents
from lit_grpo.training.user_hooks import guard_hooks
from lit_grpo.training.waiting import RankWaits
from lit_grpo.types import UserError, check_range
from lit_grpo.types.field_types import check_value
from lit_grpo.types.overrides import check_made, check_overrides
from lit_grpo.types.settings import check_type

log = logging.getLogger(__name__)

INSTEAD_OF_HOOKS = {
    "configure_optimizers": (
        ", or pass optimizer=functools.partial(torch.optim.AdamW, lr=1e-5) to the constructor "
        "instead, with lr_schedule and warmup_steps"
    ),
    "training_step": "; a loss of your own is objective=Objective(function=...) of a GRPOModule",
}
"""Hook of a module -> what to do rather than override it."""


def _is_same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, int | float | str) and one == other)


class PolicyModule(L.LightningModule):
    """Hold a policy, its engine and its optimizer. Arguments are as in ``GRPOModule``."""

    _settings: ClassVar[frozenset[str]] = frozenset()
    """Names of the constructor's arguments."""

    def __init__(
        self,
        policy: PolicyOrPath,
        sampling: Sampling,
        engine: RolloutEngine | None,
        optimizer: OptimizerCallable,
        lr_schedule: Schedule,
        warmup_steps: int,
        evaluation: Evaluation | None,
        seed: int,
    ) -> None:
        super().__init__()
        check_overrides(type(self), INSTEAD_OF_HOOKS)
        self.has_trained = False
        """Whether it has taken a step, under any trainer."""
        given: Any = policy  # a path, or what Policy's error says to pass in another way
        is_start = isinstance(given, str | PathLike | Mapping | nn.Module)
        if is_start and not isinstance(given, Policy):
            given = Policy(cast(str, given))
        self.policy: Policy = given
        check_type("model.policy", self.policy, Policy)
        check_made(self.policy)
        check_type("model.sampling", sampling, Sampling)
        self.sampling = sampling
        self.engine = engine or HFEngine()
        check_type("model.engine", self.engine, RolloutEngine)
        check_made(self.engine)
        check_function(optimizer)
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
        self._optimizer_class = ""
        self._optimizer_settings: list[dict[str, Any]] = []
        self._run_settings = RunSettings()
        self.events = StageEvents(self)
        self._waiting = RankWaits(self.events)
        self._has_logged = False

    needs_reference = False
    refreshes_reference = False
    samples_in_training: ClassVar[bool] = True
    """Whether completions are sampled in each step, not only in evaluation."""
    usual_lora_rate: ClassVar[float]
    """Learning rate that LoRA takes for models of 0.5B to 8B."""

    def forward(self, function: Callable[[], T]) -> T:
        """Call a function; a strategy that wraps the module provides its weights meanwhile."""
        return function()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        ours = [one for one in cls.__mro__ if one.__module__.startswith("lit_grpo.")]
        cls._settings = frozenset(name for one in ours for name in signature(one).parameters)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless it is a setting, which parts of the module were built from.

        Raises:
            UserError: it is a setting, and has another value.
        """
        is_set = name in vars(self) or name in vars(self).get("_modules", ())
        if is_set and name in self._settings and not _is_same(getattr(self, name), value):
            raise UserError(
                f"{name} of a {type(self).__name__} cannot be changed once it is made (parts of it "
                "may have been built from it). Pass it to the constructor; in a subclass, to "
                "super().__init__."
            )
        super().__setattr__(name, value)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.policy.tokenizer

    @property
    def can_end(self) -> bool:
        """Whether anything but the token limit ends a completion; of a loaded policy."""
        return bool(self.sampling.stop or stop_token_ids(self.policy, self.sampling))

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
        if self.policy.model is None:
            source = self.policy.path or "with random weights"
            rank_zero_only(log.info)("loading the model %s", source)
        seed_everything(self.seed)  # random initial weights must be the same on all ranks
        self.load_models()
        trains = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if self.samples_in_training or not trains:
            check_completions_fit(max_positions(self.policy.model.config), self.sampling)
        start_engine(self.engine, self.policy)

    @property
    def _sharding(self) -> Sharding:
        """How the strategy shards models; not at all without a trainer."""
        strategy = None if self._trainer is None else self.trainer.strategy
        sharding: Sharding = getattr(strategy, "sharding", UNSHARDED)
        return sharding

    def load_models(self) -> None:
        """Load what this training needs, before an engine takes its share of the memory."""
        self.policy.load(
            with_reference=self.needs_reference,
            refreshes_reference=self.refreshes_reference,
            sharding=self._sharding,
        )

    def configure_callbacks(self) -> list[Callback]:
        """Check the trainer before Lightning does, whose advice would be wrong; add no callback."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.check_trainer(self.trainer)
        return []

    def check_trainer(self, trainer: L.Trainer) -> None:
        """Check what a trainer was made with.

        Raises:
            UserError: it has a setting or a callback for which lit-grpo has keys of its own.
        """
        refuse_automatic(trainer, self)

    def setup(self, stage: str) -> None:
        begin_without_stop(self.trainer)
        for owner in (self, *self.trainer.callbacks):  # type: ignore[attr-defined]
            guard_hooks(owner)
        refuse_unsupported(self.trainer)
        samples_with_policy = self.engine.samples_with_policy
        warn_of_casts(self.policy, self.trainer, samples_with_policy=samples_with_policy)
        self.engine.check_processes(self.trainer.world_size, self.trainer.num_nodes)
        if self.trainer.node_rank == 0:
            self.engine.check_installation()
        self.engine.precision = self.trainer.precision
        self.engine.on_wait = self._waiting.join_round
        self.evaluation.suite.start(self.reasoning)

    def on_fit_end(self) -> None:
        log_stop(self.trainer)

    def teardown(self, stage: str) -> None:
        self.close()

    def record_spending(self, run_dir: Path) -> None:
        """Keep what judges cost from now on in the run's directory; every rank must call this."""
        self.evaluation.suite.record_spending(run_dir)

    def close(self) -> None:
        """Close the engine and the rewards; Lightning skips ``teardown`` when a run fails."""
        close_engine(self.engine)
        self.evaluation.suite.close()

    def configure_optimizers(self) -> Any:
        optimizer = self.build_optimizer(self.policy.trainable_parameters())
        check_updates(optimizer, type(self.trainer.strategy), get_world_size())
        schedule = build_schedule(
            optimizer, self.lr_schedule, self.warmup_steps, self.num_optimizer_steps
        )
        scale_learning_rate(schedule, getattr(self.trainer, "datamodule", None))
        self._optimizer_class = optimizer_class(optimizer)
        self._optimizer_settings = configured_settings(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def build_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer of the config.

        Raises:
            UserError: it cannot be made.
        """
        return use_plain_numbers(choose_fused(built_by(self.make_optimizer, parameters)))

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

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.has_trained = self.policy.has_trained = self.trainer.global_step > 0
        if not self._has_logged:
            warn_of_unlogged(self.trainer)
        self._has_logged = True

    def whole_policy(self) -> AbstractContextManager[None]:
        """Keep a sharded policy whole within the context, if the engine samples with it.

        If it does so without ``samples_with_policy``, its first forward pass is an error: ranks
        that make different numbers of passes would wait for each other, or mix up their weights.
        """
        model = self.policy.model
        if self.engine.samples_with_policy:
            return self.policy.sharding.gathered(model)
        if is_divided(model):
            return refused_passes(model, undeclared_passes(self.engine))
        return nullcontext()
