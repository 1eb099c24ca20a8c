"""Optimizer steps over a batch: micro-batches, backward, clipping, the entropy's coefficient.

The gradient is the same for any split over micro-batches and ranks. Knows no reward and no
rollout; formulas live in `losses`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_grpo.distributed import gather_objects, sum_over_ranks
from lit_grpo.objective import Objective
from lit_grpo.objective.aggregations import TokenCounts
from lit_grpo.objective.corrections import entropy_threshold, top_entropy_tokens
from lit_grpo.objective.entropy import EntropyControl
from lit_grpo.objective.loss import token_losses
from lit_grpo.policy import Policy
from lit_grpo.policy.logprobs import CausalModel, TokenStatistics, completion_statistics
from lit_grpo.rollout import Sampling
from lit_grpo.training.batching import UpdateConfig, micro_batches, minibatches
from lit_grpo.training.metrics import Metrics, add_update_metrics
from lit_grpo.training.stages import stage
from lit_grpo.types import TrainBatch


class PolicyUpdate:
    """Changes the parameters of a policy; nothing else does.

    Args:
        module: Gives the optimizer, the trainer and the stages, under manual optimization.
    """

    def __init__(
        self,
        module: L.LightningModule,
        policy: Policy,
        sampling: Sampling,
        objective: Objective,
        config: UpdateConfig,
    ) -> None:
        self.module = module
        self.policy = policy
        self.sampling = sampling
        self.objective = objective
        self.config = config
        self.entropy_control = EntropyControl(term=objective.entropy, coef=objective.entropy.coef)

    # What the updates of one rollout step hold fixed

    def with_fixed_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Old and reference logprobs and the entropy mask, where the objective asks for them.

        With one optimizer step a rollout the old logprobs are the current ones: no pass is made.
        """
        masks_entropy = self.objective.top_entropy_fraction < 1
        if masks_entropy or (self.config.optimizer_steps > 1 and batch.old_logprobs is None):
            old = self.statistics(self.policy.causal_model, batch, every_row=masks_entropy)
            batch = replace(batch, old_logprobs=old.logprobs)
            if masks_entropy:
                batch = replace(batch, entropy_mask=self._entropy_mask(batch, old.entropy))
        if self.objective.kl.is_in_loss:
            batch = replace(batch, ref_logprobs=self.reference_logprobs(batch))
        return batch

    def reference_logprobs(self, batch: TrainBatch, *, every_row: bool = False) -> Tensor:
        """[N, C] under the reference."""
        with self.policy.reference() as reference:
            return self.statistics(reference, batch, every_row=every_row).logprobs

    def _entropy_mask(self, batch: TrainBatch, entropy: Tensor) -> Tensor:
        """The tokens of all ranks with the highest entropy before the first update."""
        entropies = torch.cat(gather_objects(entropy[batch.loss_mask].cpu()))
        threshold = entropy_threshold(entropies, self.objective.top_entropy_fraction)
        return top_entropy_tokens(entropy, batch.loss_mask, threshold)

    @torch.no_grad()
    def statistics(
        self, model: CausalModel, batch: TrainBatch, *, every_row: bool = False
    ) -> TokenStatistics:
        """[N, C] each, 0 on rows that are not trained on.

        Args:
            every_row: Also those that can have no gradient.
        """
        logprobs = torch.zeros_like(batch.sampler_logprobs)
        entropy = torch.zeros_like(logprobs)
        for rows in self._micro_batches(batch, every_row=every_row):
            part = completion_statistics(
                model, batch.select(rows), temperature=self.sampling.temperature
            )
            length = part.logprobs.shape[1]
            logprobs[rows, :length], entropy[rows, :length] = part
        return TokenStatistics(logprobs, entropy)

    # Optimizer steps

    def run(self, batch: TrainBatch, metrics: Metrics) -> None:
        """All optimizer steps of one rollout step."""
        for _ in range(self.config.epochs):
            for minibatch in minibatches(batch, self.config.minibatches):
                counts = self.count_tokens(minibatch)
                if counts.tokens:
                    self._optimizer_step(minibatch, counts, metrics)

    def count_tokens(self, batch: TrainBatch) -> TokenCounts:
        """Of the batch over all ranks."""
        local = [batch.loss_mask.sum(), batch.loss_mask.any(1).sum(), batch.surrogate_mask.sum()]
        tokens, sequences, entropy_tokens = map(int, sum_over_ranks(self.module, local))
        return TokenCounts(
            tokens=tokens,
            sequences=sequences,
            max_tokens=self.sampling.max_tokens,
            local_tokens=int(local[0]),
            num_ranks=self.module.trainer.world_size,
            entropy_tokens=entropy_tokens,
        )

    def _optimizer_step(self, batch: TrainBatch, counts: TokenCounts, metrics: Metrics) -> None:
        """One gradient over the minibatch, the same for any split into micro-batches and ranks."""
        optimizer: Any = self.module.optimizers()
        schedule: Any = self.module.lr_schedulers()
        optimizer.zero_grad()
        parts = self._micro_batches(batch)
        entropies = [torch.zeros((), device=self.module.device)]
        for number, rows in enumerate(parts):
            with optimizer.toggle_model(sync_grad=number == len(parts) - 1):
                entropies.append(self._backward(batch.select(rows), counts, number, metrics))
        if not parts:
            with optimizer.toggle_model(sync_grad=True):
                self._backward_nothing(batch)
        norm = self._clipped_gradient_norm()
        # The loss is the sum over micro-batches and ranks: one vote an optimizer step.
        metrics.add("policy/loss", 0.0, 1 / counts.num_ranks)
        metrics.add("policy/grad_norm", norm.detach())
        metrics.add("policy/lr", optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        self._follow_entropy(torch.stack(entropies).sum(), counts, metrics)

    def _clipped_gradient_norm(self) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.trainable_parameters(), self.config.max_grad_norm
        )
        if not norm.isfinite():
            raise FloatingPointError(
                f"the gradient after optimizer step {self.module.global_step} is not finite (norm "
                f"{norm}), so no optimizer step is taken: the policy would be lost. Resume from "
                "the last checkpoint with a lower learning rate or, without one, a higher "
                "precision."
            )
        return norm

    def _follow_entropy(self, entropy_sum: Tensor, counts: TokenCounts, metrics: Metrics) -> None:
        """Move the coefficient for the next optimizer step."""
        if self.objective.entropy.target is None:
            return
        metrics.add("policy/entropy_coef", self.entropy_control.applied_coef)
        (total,) = sum_over_ranks(self.module, [entropy_sum])
        self.entropy_control = self.entropy_control.after_step(
            total / max(1, counts.entropy_tokens)
        )

    def _backward_nothing(self, batch: TrainBatch) -> None:
        """Take part in the ranks' reduction of the gradient without a row that has one."""
        row = batch.select(torch.zeros(1, dtype=torch.long))
        logprobs, _ = completion_statistics(self.policy.causal_model, row)
        self.module.manual_backward(0.0 * logprobs.sum())

    def _micro_batches(self, batch: TrainBatch, *, every_row: bool = False) -> list[Tensor]:
        """The rows that can have a gradient: without a KL or entropy term one of advantage 0 has
        none, and is spared its way through the model."""
        trained = batch.loss_mask.any(1)
        if not (every_row or self.objective.moves_every_row):
            trained &= batch.advantages != 0
        return micro_batches(
            batch,
            trained.nonzero()[:, 0],
            self.config.max_tokens_per_micro_batch,
            packed=self.policy.causal_model.packs,
        )

    def _backward(
        self, batch: TrainBatch, counts: TokenCounts, number: int, metrics: Metrics
    ) -> Tensor:
        """Add a micro-batch's gradient; returns [] the sum of the entropies of its tokens."""
        entropy_coef = self.entropy_control.applied_coef
        with stage(self.module, "micro_batch", number) as details:
            statistics = completion_statistics(
                self.policy.causal_model,
                batch,
                temperature=self.sampling.temperature,
                entropy_gradient=entropy_coef != 0,
            )
            losses = token_losses(
                *statistics, batch, counts, self.objective, entropy_coef=entropy_coef
            )
            # Ranks average their gradients; the weights are those of all ranks together.
            self.module.manual_backward(losses.loss * counts.num_ranks)
            details |= {
                "rows": batch.num_rows,
                "tokens": batch.loss_mask.sum(),
                "pg_loss": (losses.surrogate * losses.weights).sum(),
                "loss": losses.loss.detach(),
            }
            if losses.kl is not None:
                details["kl"] = (losses.kl * losses.weights).sum()
            add_update_metrics(metrics, batch, losses, statistics.entropy)
            metrics.add("policy/loss", details["loss"], 0.0)
        return (statistics.entropy.detach() * batch.surrogate_mask).sum()
