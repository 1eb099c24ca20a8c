"""GRPO as a LightningModule: rollout -> reward -> advantage -> loss -> optimizer.

Source: GRPO, arXiv 2402.03300 algorithm 1. One ``training_step`` is one rollout step, under
manual optimization. Formulas live in `advantages` and `losses`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lit_grpo.advantages import AdvantageConfig, compute_advantages
from lit_grpo.batching import UpdateConfig, collate_rollouts, micro_batches, minibatches
from lit_grpo.evaluation import Evaluation
from lit_grpo.logprobs import CausalModel, completion_statistics
from lit_grpo.losses import AGGREGATIONS, Objective, TokenCounts, token_losses
from lit_grpo.metrics import (
    Metrics,
    add_advantage_metrics,
    add_rollout_metrics,
    add_update_metrics,
)
from lit_grpo.policy import Policy
from lit_grpo.policy_module import (
    PolicyModule,
    Schedule,
    SeedPurpose,
    default_optimizer,
    seed_everything,
)
from lit_grpo.rewards import Reward, RewardSuite, Scoring
from lit_grpo.rollout import RolloutEngine, Sampling
from lit_grpo.stages import in_stage, stage
from lit_grpo.types import Prompt, RolloutBatch, TrainBatch

log = logging.getLogger(__name__)


class GRPOModule(PolicyModule):
    """Trains a policy on groups of its own completions.

    Args:
        policy: The model to train.
        rewards: What completions are worth; the weighted sum counts.
        group_size: Completions a prompt, at least 2.
        sampling: How they are drawn.
        engine: What draws them; by default the policy itself.
        objective: What an optimizer step minimises.
        advantage: How rewards become advantages.
        update: How a rollout step becomes optimizer steps.
        optimizer: Made from the trainable parameters.
        lr_schedule: Shape of the learning rate over the run's optimizer steps.
        warmup_steps: Optimizer steps of linear warm-up.
        evaluation: How held-out accuracy is measured.
        seed: Of everything that is drawn.

    Raises:
        ValueError: impossible settings, when the config is read.
    """

    def __init__(
        self,
        policy: Policy,
        rewards: list[Reward],
        group_size: int = 8,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        engine: RolloutEngine | None = None,
        objective: Objective = Objective(),  # noqa: B008 - frozen
        advantage: AdvantageConfig = AdvantageConfig(),  # noqa: B008 - frozen
        update: UpdateConfig = UpdateConfig(),  # noqa: B008 - frozen
        optimizer: OptimizerCallable = default_optimizer,
        lr_schedule: Schedule = "constant",
        warmup_steps: int = 0,
        evaluation: Evaluation | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            policy, sampling, engine, optimizer, lr_schedule, warmup_steps, evaluation, seed
        )
        if group_size < 2:
            raise ValueError(
                f"group_size must be >= 2, got {group_size} (a group of one has no baseline). "
                "Set model.group_size."
            )
        if sampling.is_greedy:
            raise ValueError(
                "sampling.temperature must be > 0 in training, got 0 (identical completions have "
                "no advantage over each other). Set model.sampling.temperature."
            )
        self.automatic_optimization = False
        self.rewards = RewardSuite(rewards)
        self.group_size = group_size
        self.objective = objective
        self.advantage = advantage
        self.update = update
        self.rollout_step = 0
        self._logged_names: dict[str, float] = {}

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        return self.objective.kl_coef > 0

    def optimizer_steps_of(self, num_batches: int) -> int:
        return num_batches * self.update.optimizer_steps

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self.rewards.start()

    def on_train_start(self) -> None:
        self.rewards.check(self.trainer.train_dataloader.prompts)  # type: ignore[union-attr]
        super().on_train_start()

    def close(self) -> None:
        self.rewards.close()
        super().close()

    # The step

    def training_step(self, prompts: Sequence[Prompt], batch_idx: int) -> dict[str, Any]:
        """rollout -> reward -> advantage -> loss -> optimizer."""
        metrics = Metrics()
        rollouts = self.collect(prompts, metrics)
        batch = self.build_train_batch(rollouts, metrics)
        if batch is not None:
            self.update_policy(batch, metrics)
        self.rollout_step += 1
        values = metrics.merged()
        # Lightning would log the last value of a name once more where a step has none.
        self._logged_names |= dict.fromkeys(values, math.nan)
        self.log_dict(self._logged_names | values)
        return {"rollouts": rollouts, "batch": batch, "metrics": values}

    def collect(self, prompts: Sequence[Prompt], metrics: Metrics) -> RolloutBatch:
        """B scored groups; scoring overlaps generation."""
        seed = self.derive_seed(SeedPurpose.ROLLOUT, self.rollout_step)
        seed_everything(seed)
        self._sync_weights()
        scoring = self.rewards.open(prompts, self.group_size)
        self._generate(prompts, scoring, seed)
        return self._await_scores(scoring, metrics)

    @in_stage("weight_sync")
    def _sync_weights(self) -> None:
        self.engine.load_weights(self.policy, self.global_step)

    @in_stage("generation")
    def _generate(self, prompts: Sequence[Prompt], scoring: Scoring, seed: int) -> None:
        sampled = self.engine.generate(prompts, self.group_size, self.sampling, seed=seed)
        for row, completion in sampled:
            scoring.add(row, completion)

    def _await_scores(self, scoring: Scoring, metrics: Metrics) -> RolloutBatch:
        with stage(self, "reward") as details:
            rollouts = scoring.result()
            rewards = rollouts.rewards[rollouts.valid]
            if len(rewards):
                details |= {"reward_mean": rewards.mean(), "reward_std": rewards.std(correction=0)}
        add_rollout_metrics(metrics, rollouts)
        return rollouts

    def build_train_batch(self, rollouts: RolloutBatch, metrics: Metrics) -> TrainBatch | None:
        """Advantages, old and reference logprobs; None when no rank has a token to train on."""
        weights = {reward.name: reward.weight for reward in self.rewards.rewards}
        advantages = compute_advantages(self._gathered(rollouts), weights, self.advantage)
        own = advantages.tensor_split(self.trainer.world_size)[self.global_rank]
        batch = collate_rollouts(
            rollouts,
            own,
            pad_id=self.tokenizer.pad_token_id,
            overlong_filtering=self.objective.overlong_filtering,
        )
        add_advantage_metrics(metrics, batch.advantages, batch.loss_mask.any(1))
        batch = batch.to(self.device)
        if self._count_tokens(batch).tokens == 0:
            log.warning(
                "rollout step %d has no token to train on, so no optimizer step is taken: every "
                "row is invalid, alone in its group or filtered. See reward/valid_fraction and "
                "the outcomes in completions/.",
                self.rollout_step,
            )
            return None
        return self._with_fixed_logprobs(batch)

    @in_stage("logprob")
    def _with_fixed_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """With one optimizer step a rollout the old logprobs are the current ones."""
        if self.update.optimizer_steps > 1:
            batch = replace(batch, old_logprobs=self._logprobs(self.policy.causal_model, batch))
        if self.needs_reference:
            with self.policy.reference() as reference:
                batch = replace(batch, ref_logprobs=self._logprobs(reference, batch))
        return batch

    @torch.no_grad()
    def _logprobs(self, model: CausalModel, batch: TrainBatch) -> Tensor:
        """[N, C], 0 on rows that are not trained on."""
        logprobs = torch.zeros_like(batch.sampler_logprobs)
        for rows in self._micro_batches(batch):
            part, _ = completion_statistics(
                model, batch.select(rows), temperature=self.sampling.temperature
            )
            logprobs[rows, : part.shape[1]] = part
        return logprobs

    @in_stage("update")
    def update_policy(self, batch: TrainBatch, metrics: Metrics) -> None:
        """The only place where parameters change."""
        for _ in range(self.update.epochs):
            for minibatch in minibatches(batch, self.update.minibatches):
                self._optimizer_step(minibatch, metrics)

    def _optimizer_step(self, batch: TrainBatch, metrics: Metrics) -> None:
        """One gradient over the minibatch, the same for any split into micro-batches and ranks."""
        counts = self._count_tokens(batch)
        if counts.tokens == 0:
            return
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        optimizer.zero_grad()
        parts = self._micro_batches(batch)
        for number, rows in enumerate(parts):
            with optimizer.toggle_model(sync_grad=number == len(parts) - 1):
                self._backward(batch.select(rows), counts, number, metrics)
        if not parts:
            with optimizer.toggle_model(sync_grad=True):
                self._backward_nothing(batch)
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.trainable_parameters(), self.update.max_grad_norm
        )
        if not norm.isfinite():
            raise FloatingPointError(
                f"the gradient of rollout step {self.rollout_step} is not finite (norm {norm}), "
                "so no optimizer step is taken: the policy would be lost. Resume from the last "
                "checkpoint with a lower learning rate or, without one, a higher precision."
            )
        # The loss is the sum over micro-batches and ranks: one vote an optimizer step.
        metrics.add("policy/loss", 0.0, 1 / self.trainer.world_size)
        metrics.add("policy/grad_norm", norm.detach())
        metrics.add("policy/lr", optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()

    def _backward_nothing(self, batch: TrainBatch) -> None:
        """Take part in the ranks' reduction of the gradient without a row that has one."""
        row = batch.select(torch.zeros(1, dtype=torch.long))
        logprobs, _ = completion_statistics(self.policy.causal_model, row)
        self.manual_backward(0.0 * logprobs.sum())

    def _micro_batches(self, batch: TrainBatch) -> list[Tensor]:
        """The rows that can have a gradient: with neither a KL nor an entropy term one without
        advantage has none, and is spared its way through the model."""
        trained = batch.loss_mask.any(1)
        if self.objective.kl_coef == self.objective.entropy_coef == 0:
            trained &= batch.advantages != 0
        rows = trained.nonzero()[:, 0]
        return micro_batches(batch, rows, self.update.max_tokens_per_micro_batch)

    def _backward(
        self, batch: TrainBatch, counts: TokenCounts, number: int, metrics: Metrics
    ) -> None:
        with stage(self, "micro_batch", number) as details:
            statistics = completion_statistics(
                self.policy.causal_model,
                batch,
                temperature=self.sampling.temperature,
                entropy_gradient=self.objective.entropy_coef != 0,
            )
            losses = token_losses(*statistics, batch, self.objective)
            weights = AGGREGATIONS[self.objective.aggregation](batch.loss_mask, counts)
            loss = (losses.total * weights).sum()
            # Ranks average their gradients; the weights are those of all ranks together.
            self.manual_backward(loss * self.trainer.world_size)
            details |= {
                "rows": batch.num_rows,
                "tokens": batch.loss_mask.sum(),
                "pg_loss": (losses.surrogate * weights).sum(),
                "loss": loss.detach(),
            }
            if losses.kl is not None:
                details["kl"] = (losses.kl * weights).sum()
            add_update_metrics(metrics, batch, losses, statistics.entropy)
            metrics.add("policy/loss", details["loss"], 0.0)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["rollout_step"] = self.rollout_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.rollout_step = checkpoint["rollout_step"]

    # Over ranks

    def _gathered(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Rewards of all ranks, for a deviation over the batch."""
        if self.trainer.world_size == 1:
            return rollouts

        def gather(tensor: Tensor) -> Tensor:
            gathered = self.all_gather(tensor.to(self.device))
            assert isinstance(gathered, Tensor)
            return gathered.flatten(0, 1).cpu()

        return replace(
            rollouts,
            rewards=gather(rollouts.rewards),
            valid=gather(rollouts.valid),
            parts={name: gather(part) for name, part in rollouts.parts.items()},
        )

    def _count_tokens(self, batch: TrainBatch) -> TokenCounts:
        counts = torch.stack([batch.loss_mask.sum(), batch.loss_mask.any(1).sum()])
        tokens, sequences = self.trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        return TokenCounts(
            tokens=int(tokens), sequences=int(sequences), max_tokens=self.sampling.max_tokens
        )
