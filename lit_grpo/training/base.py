"""What warm-up and GRPO share: a policy, its optimizer, held-out evaluation, exact checkpoints.

Knows no objective.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import ceil
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from transformers import PreTrainedTokenizerBase, get_scheduler

from lit_grpo.distributed import any_failure
from lit_grpo.policy import Policy
from lit_grpo.rollout import EngineFailed, HFEngine, RolloutEngine, Sampling
from lit_grpo.stopping import ENGINE_EXIT_CODE, get_stop_reason, stop_run
from lit_grpo.training.evaluation import Evaluation
from lit_grpo.training.metrics import Metrics
from lit_grpo.training.seeds import SeedPurpose, derive_seed, seed_everything
from lit_grpo.training.stages import in_stage
from lit_grpo.types import Prompt, StopReason, UserError

log = logging.getLogger(__name__)

Schedule = Literal["constant", "linear", "cosine"]


def default_optimizer(params: Any) -> torch.optim.Optimizer:
    """AdamW as GRPO runs commonly set it."""
    return torch.optim.AdamW(params, lr=1e-6, weight_decay=0.0)


class PolicyModule(L.LightningModule):
    """A policy that is trained and evaluated.

    Random numbers are counted, not carried: each event draws from a seed of its own, made of
    (seed, rank, purpose, number), so that a resumed run draws what an uninterrupted one would.
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
        self.policy = policy
        self.sampling = sampling
        self.engine = engine or HFEngine()
        self.make_optimizer = optimizer
        self.lr_schedule = lr_schedule
        self.warmup_steps = warmup_steps
        self.evaluation = evaluation or Evaluation()
        self.seed = seed

    needs_reference = False
    moves_reference = False

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.policy.tokenizer

    # Life of a run

    def configure_model(self) -> None:
        seed_everything(self.seed)  # the same on all ranks: the weights may be random
        self.policy.load(with_reference=self.needs_reference, moving_reference=self.moves_reference)
        self.engine.start(self.policy)

    def setup(self, stage: str) -> None:
        refuse_untested(self.trainer)
        self.evaluation.suite.start()

    def teardown(self, stage: str) -> None:
        self.close()

    def close(self) -> None:
        """Give back what engine and rewards hold; Lightning's ``teardown`` misses failed runs."""
        self.engine.close()
        self.evaluation.suite.close()

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.policy.trainable_parameters())
        if self.lr_schedule == "constant":
            schedule = get_scheduler("constant_with_warmup", optimizer, self.warmup_steps)
        else:
            num_steps = self.num_optimizer_steps()
            schedule = get_scheduler(self.lr_schedule, optimizer, self.warmup_steps, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, for the schedule.

        Raises:
            ValueError: neither ``trainer.max_steps`` nor ``trainer.max_epochs`` ends the run.
        """
        trainer = self.trainer
        if trainer.max_steps > 0:
            return trainer.max_steps
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            raise UserError(
                f"the run has no end, so its {self.lr_schedule} schedule has no length. "
                "Set trainer.max_steps or trainer.max_epochs, or model.lr_schedule to constant."
            )
        trainer.fit_loop.setup_data()
        return self.optimizer_steps_of(int(trainer.num_training_batches)) * trainer.max_epochs

    def optimizer_steps_of(self, num_batches: int) -> int:
        """Optimizer steps of one epoch; its last batch steps however few were accumulated."""
        return ceil(num_batches / self.trainer.accumulate_grad_batches)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Prompts stay where they are; the tensors made of them go to the device."""
        return batch

    # Random numbers

    def derive_seed(self, purpose: SeedPurpose, *number: int) -> int:
        """The seed of one numbered event of this run on this rank."""
        return derive_seed(self.seed, self.global_rank, purpose, *number)

    # Held-out evaluation

    def on_train_start(self) -> None:
        loader = self.trainer.val_dataloaders
        if not loader:
            return
        self.evaluation.suite.check(loader.prompts)
        if self.evaluation.before_training and self.global_step == 0:
            self._evaluate_before_training(loader)

    def _evaluate_before_training(self, loader: Iterable[Sequence[Prompt]]) -> None:
        num_batches = int(sum(self.trainer.num_val_batches))
        self.on_validation_epoch_start()
        with self.trainer.precision_plugin.val_step_context():
            for batch_idx, prompts in enumerate(islice(loader, num_batches)):
                self.validation_step(prompts, batch_idx)
        metrics = self._val_metrics.merged()
        for logger in self.loggers:
            logger.log_metrics(metrics, step=0)
        log.info("before training: %s", ", ".join(f"{k} {v:.3f}" for k, v in metrics.items()))
        if reason := get_stop_reason(self.trainer):
            raise EngineFailed(reason.message)  # there is no step to keep

    def on_validation_epoch_start(self) -> None:
        self._val_metrics = Metrics()
        with self._engine_may_fail():
            self.engine.load_weights(self.policy, self.global_step)

    @in_stage("evaluation")
    def validation_step(self, prompts: Sequence[Prompt], batch_idx: int) -> None:
        seed = self.derive_seed(SeedPurpose.EVALUATION, batch_idx)
        with self._engine_may_fail():
            self.evaluation.add_metrics(
                self._val_metrics, self.engine, prompts, self.sampling, seed=seed
            )

    @contextmanager
    def _engine_may_fail(self) -> Iterator[None]:
        """An evaluation without an engine is left out and ends a training, with its checkpoint;
        every rank must come here."""
        failure = ""
        try:
            yield
        except EngineFailed as error:
            failure = str(error)
        why = any_failure(failure)
        if why and (self.trainer.state.fn != "fit" or self.trainer.sanity_checking):
            raise EngineFailed(why)
        if why:
            message = f"Stopped at an evaluation: {why}"
            stop_run(self.trainer, StopReason(exit_code=ENGINE_EXIT_CODE, message=message))

    def on_validation_epoch_end(self) -> None:
        # A checkpoint is chosen by these: where nothing could be judged, not by an older value.
        absent = dict.fromkeys(self.evaluation.metric_names, math.nan)
        self.log_dict(absent | self._val_metrics.merged())

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        values = self._val_metrics.merged()
        self.log_dict({name.replace("val/", "test/"): value for name, value in values.items()})

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._base_is_elsewhere:
            # Tied weights stand in the state under each of their names.
            every = self.named_parameters(remove_duplicate=False)
            frozen = {name for name, parameter in every if not parameter.requires_grad}
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {k: v for k, v in weights.items() if k not in frozen}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = {n for n, p in self.named_parameters() if p.requires_grad}
        if missing := sorted(trained - checkpoint["state_dict"].keys()):
            raise UserError(
                f"the checkpoint lacks {len(missing)} trained parameters, first {missing[0]!r}: "
                "it is of another policy. Set model.policy as it was in that run's config.yaml."
            )
        self.strict_loading = not self._base_is_elsewhere

    @property
    def _base_is_elsewhere(self) -> bool:
        """The frozen base under an adapter is read from ``policy.path``, not from checkpoints."""
        return self.policy.lora is not None and self.policy.path is not None


def refuse_untested(trainer: L.Trainer) -> None:
    """Keep off what is known or likely to train wrongly without a word.

    Raises:
        ValueError: a strategy that shards the policy, or another precision than two.
    """
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise UserError(
            f"trainer.strategy must be auto or ddp, got {type(trainer.strategy).__name__} (a "
            "step on a sharded policy is not tested yet, and DeepSpeed drops gradients of several "
            "backward passes). Set trainer.strategy."
        )
    if trainer.precision not in ("32-true", "bf16-mixed"):
        raise UserError(
            f"trainer.precision must be 32-true or bf16-mixed, got {trainer.precision} (float16 "
            "gradients would be clipped before they are unscaled; for bfloat16 weights set "
            "model.policy.dtype). Set trainer.precision."
        )
