"""Optimizer steps over a batch: micro-batches, backward, clipping, the entropy coefficient.

The gradient is the same for any split into micro-batches and over ranks. The formulas are in
`objective`.
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lit_grpo.diagnostics.step_log import step_number
from lit_grpo.distributed.gradients import steps_of
from lit_grpo.distributed.ranks import max_over_ranks, sum_over_ranks
from lit_grpo.objective import Objective
from lit_grpo.objective.inputs import TokenCounts
from lit_grpo.objective.loss import token_losses
from lit_grpo.policy import Policy
from lit_grpo.policy.logprobs import candidate_statistics, completion_statistics
from lit_grpo.rollout import Sampling
from lit_grpo.training.batching import (
    UpdateConfig,
    count_tokens,
    first_row,
    micro_batches,
    minibatches,
    rows_with_gradient,
)
from lit_grpo.training.metrics import Metrics, add_update_metrics
from lit_grpo.training.optimizer.coefficients import Coefficients
from lit_grpo.training.optimizer.skipped_steps import SkippedSteps
from lit_grpo.training.stages import StageEvents
from lit_grpo.types import StageProgress, TrainBatch

log = logging.getLogger(__name__)


class PolicyUpdater:
    """Update a policy on batches of rollouts.

    Args:
        module: Owns the optimizer; must use manual optimization.
        events: Reports the micro-batches to callbacks.
    """

    def __init__(
        self,
        module: L.LightningModule,
        events: StageEvents,
        policy: Policy,
        sampling: Sampling,
        objective: Objective,
        config: UpdateConfig,
    ) -> None:
        self.module = module
        self.events = events
        self.policy = policy
        self.sampling = sampling
        self.objective = objective
        self.config = config
        self._progress, self._has_warned = StageProgress(), False
        self._num_micro_batches = 0
        self.skipped_steps = SkippedSteps(
            events.report_skipped_step,
            config.max_skipped_steps,
            setting="model.update.max_skipped_steps",
            advice=objective.advice_if_not_finite,
        )
        self.coefficients = Coefficients(objective)

    def progress(self) -> StageProgress:
        """Return how many rows have been through the update that is running."""
        return self._progress

    def optimize(self, batch: TrainBatch, metrics: Metrics) -> None:
        """Take all optimizer steps of one rollout step; skip those without a finite gradient."""
        num_rows = self.config.epochs * len(rows_with_gradient(batch, self.objective))
        self._progress = StageProgress(total=num_rows)
        self._num_micro_batches = 0
        self._warn_of_few_groups(batch.prompt_ids.shape[0])
        epochs = (minibatches(batch, self.config.minibatches) for _ in range(self.config.epochs))
        for number, minibatch in enumerate(chain.from_iterable(epochs), start=1):
            counts = count_tokens(self.module, minibatch, self.sampling.max_tokens)
            if counts.tokens and not self.skipped_steps.num_at_limit:
                self._optimizer_step(minibatch, counts, number, metrics)

    def _warn_of_few_groups(self, num_groups: int) -> None:
        """Log once that a rollout step takes fewer optimizer steps than configured."""
        if num_groups < self.config.minibatches and not self._has_warned:
            self._has_warned = True
            rank_zero_only(log.warning)(
                "a rollout step has %d groups, so it is split into %d minibatches, not %d. Set "
                "model.update.minibatches to at most the number of groups in a step.",
                *(num_groups, num_groups, self.config.minibatches),
            )

    def _optimizer_step(
        self, minibatch: TrainBatch, counts: TokenCounts, number: int, metrics: Metrics
    ) -> None:
        """Take one optimizer step on the gradient of the whole minibatch over all ranks.

        Args:
            number: Number of the optimizer step within the rollout step, from 1.
        """
        optimizer: Any = self.module.optimizers()
        schedule: Any = self.module.lr_schedulers()
        optimizer.zero_grad()
        rows = rows_with_gradient(minibatch, self.objective)
        max_tokens = self.config.max_tokens_per_micro_batch
        packed = self.policy.body_and_head.uses_packing
        parts = micro_batches(minibatch, rows, max_tokens, packed=packed)
        entropies = [torch.zeros((), device=self.module.device)]
        num_passes = self._num_passes(len(parts))
        for index in range(num_passes):
            with optimizer.toggle_model(sync_grad=index == num_passes - 1):
                if index < len(parts):
                    micro_batch = minibatch.select(parts[index])
                    entropies.append(self._backward(micro_batch, counts, metrics))
                else:
                    self._backward_nothing(minibatch)
        steps = steps_of(self.module.trainer.strategy)
        parameters = self.policy.trainable_parameters()
        norm, is_taken = steps.take(optimizer, parameters, self.config.max_grad_norm)
        # _backward adds the loss of each micro-batch with count 0. With the count added here, the
        # metric is the sum over micro-batches and ranks, averaged over optimizer steps.
        metrics.add("policy/loss", 0.0, 1 / counts.num_ranks)
        metrics.add("policy/lr", optimizer.param_groups[0]["lr"])
        metrics.add("policy/skipped_fraction", float(not is_taken))
        if not is_taken:
            self.skipped_steps.count(self._place(number), norm)
            return
        self.skipped_steps.count_taken()
        metrics.add("policy/grad_norm", norm.detach())
        schedule.step()
        self._update_entropy_coef(torch.stack(entropies).sum(), counts, metrics)

    def _place(self, number: int) -> str:
        """Name an optimizer step of the running rollout step, from 1."""
        place = f"rollout step {step_number(self.module.trainer)}"
        is_only = self.config.optimizer_steps == 1
        return place if is_only else f"optimizer step {number} of {place}"

    def _update_entropy_coef(
        self, entropy_sum: Tensor, counts: TokenCounts, metrics: Metrics
    ) -> None:
        """Adapt the coefficient of the next optimizer step to the entropy of this one."""
        if self.objective.entropy.target is None:
            return
        control = self.coefficients.entropy
        metrics.add("policy/entropy_coef", control.applied_coef)
        (total,) = sum_over_ranks(self.module, [entropy_sum])
        self.coefficients.entropy = control.after_step(total / max(1, counts.entropy_tokens))

    def _num_passes(self, num_micro_batches: int) -> int:
        """Return how many forward and backward passes this rank makes, at least one.

        It joins in the reduction of the gradients over ranks and, if the policy is sharded, in
        every pass.
        """
        if self.policy.body_and_head.is_sharded:
            num_micro_batches = max_over_ranks(num_micro_batches)
        return max(1, num_micro_batches)

    def _backward_nothing(self, minibatch: TrainBatch) -> None:
        """Make a pass that adds nothing to the gradient, because other ranks make one."""
        logprobs, _ = completion_statistics(self.policy.body_and_head, first_row(minibatch))
        self.module.manual_backward(0.0 * logprobs.sum())

    def _backward(self, micro_batch: TrainBatch, counts: TokenCounts, metrics: Metrics) -> Tensor:
        """Accumulate the gradient of a micro-batch; return the sum of its token entropies."""
        entropy_coef = self.coefficients.entropy.applied_coef
        number = self._num_micro_batches
        self._num_micro_batches += 1
        with self.events.stage("micro_batch", number) as details:
            statistics, candidate_logprobs = candidate_statistics(
                self.policy.body_and_head,
                micro_batch,
                micro_batch.teacher_ids,
                temperature=self.sampling.temperature,
                entropy_gradient=entropy_coef != 0 or self.objective.function is not None,
            )
            moved = micro_batch.to(self.module.device)
            losses = token_losses(
                *statistics,
                moved,
                counts,
                self.objective,
                entropy_coef=entropy_coef,
                kl_coef=self.coefficients.kl.coef,
                candidate_logprobs=candidate_logprobs,
            )
            # DDP averages gradients over ranks, but this loss is one rank's share of their sum.
            self.module.manual_backward(losses.loss * counts.num_ranks)
            details |= {
                "rows": micro_batch.num_rows,
                "tokens": micro_batch.loss_mask.sum(),
                "pg_loss": (losses.surrogate * losses.weights).sum(),
                "loss": losses.loss.detach(),
            }
            if losses.kl is not None:
                details["kl"] = (losses.kl * losses.weights).sum()
            add_update_metrics(metrics, moved, losses, statistics.entropy)
            metrics.add("policy/loss", details["loss"], 0.0)
        self._progress = self._progress.advanced(micro_batch.num_rows)
        return (statistics.entropy.detach() * moved.surrogate_mask).sum()
