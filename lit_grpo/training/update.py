"""Optimizer steps over a batch: micro-batches, backward, clipping, the entropy coefficient.

The gradient is the same for any split into micro-batches and over ranks. The formulas are in
`objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_grpo.distributed import sum_over_ranks
from lit_grpo.objective import Objective, TokenCounts
from lit_grpo.objective.entropy import EntropyControl
from lit_grpo.objective.kl import KLControl
from lit_grpo.objective.loss import token_losses
from lit_grpo.policy import Policy
from lit_grpo.policy.logprobs import (
    CausalModel,
    TokenStatistics,
    candidate_statistics,
    completion_statistics,
)
from lit_grpo.policy.teacher import Teacher, TeacherFailed
from lit_grpo.rollout import Sampling
from lit_grpo.training.batching import UpdateConfig, micro_batches, minibatches
from lit_grpo.training.metrics import Metrics, add_update_metrics
from lit_grpo.training.score_gate import abandon_if_failed
from lit_grpo.training.stages import StageEvents
from lit_grpo.training.token_selection import select_tokens
from lit_grpo.types import StageProgress, TokenBatch, TrainBatch


class PolicyUpdate:
    """Update a policy on batches of rollouts.

    Args:
        module: Owns the optimizer; must use manual optimization.
        events: Reports the micro-batches to callbacks.
        teacher: The teacher, if the objective has a distillation term.
    """

    def __init__(
        self,
        module: L.LightningModule,
        events: StageEvents,
        policy: Policy,
        sampling: Sampling,
        objective: Objective,
        config: UpdateConfig,
        teacher: Teacher | None = None,
    ) -> None:
        self.module = module
        self.events = events
        self.policy = policy
        self.sampling = sampling
        self.objective = objective
        self.config = config
        self.teacher = teacher
        self._progress = StageProgress()
        self.entropy_control = EntropyControl(term=objective.entropy, coef=objective.entropy.coef)
        self.kl_control = KLControl(term=objective.kl, coef=objective.kl.coef)

    def prepare(self, batch: TrainBatch, seed: int) -> TrainBatch | None:
        """Add what the objective needs of old policy, reference and teacher, and masks of tokens.

        With one optimizer step per rollout step the old logprobs equal the current ones, so no
        forward pass is made for them. Return None if no rank has a token to train on.

        Args:
            seed: Seed of what is drawn at random.

        Raises:
            StepAbandoned: the teacher of any rank cannot read the completions.
        """
        if not self._count_tokens(batch).tokens:
            return None
        objective = self.objective
        selects_tokens = objective.top_entropy_fraction < 1 or objective.covariance is not None
        is_compared = self.config.optimizer_steps > 1 and objective.old_logprobs == "policy"
        if selects_tokens or (is_compared and batch.old_logprobs is None):
            rows = _rows(batch.loss_mask) if selects_tokens else self._rows_with_gradient(batch)
            old = self._statistics(self.policy.causal_model, batch, rows)
            batch = replace(batch, old_logprobs=old.logprobs)
            batch = select_tokens(batch, old.entropy, objective, seed)
        if self.objective.kl.is_in_loss:
            rows = self._rows_with_gradient(batch)
            with self.policy.reference() as reference:
                statistics = self._statistics(reference, batch, rows)
            batch = replace(batch, ref_logprobs=statistics.logprobs)
        return batch if self.teacher is None else self._with_teacher(batch, self.teacher)

    def _with_teacher(self, batch: TrainBatch, teacher: Teacher) -> TrainBatch:
        """Add the logprobs of the teacher, of the sampled tokens or of its most likely ones.

        Raises:
            StepAbandoned: the teacher of any rank cannot read the completions.
        """
        shape, top_k = batch.completion_ids.shape, self.objective.distillation.top_k
        values = [torch.zeros(shape)]
        if top_k is not None:
            top_k = min(top_k, self.policy.causal_model.vocab_size)
            values = [torch.zeros(*shape, top_k, dtype=torch.int32), torch.zeros(*shape, top_k)]
        failure, rows = "", self._rows_with_gradient(batch)
        try:
            self._fill(values, teacher.read, batch, rows, packed=teacher.uses_packing)
        except TeacherFailed as error:
            failure = str(error)
        abandon_if_failed(failure)
        ids = None if top_k is None else values[0]
        return replace(batch, teacher_ids=ids, teacher_logprobs=values[-1])

    def progress(self) -> StageProgress:
        """Return how many rows have been through the forward pass or update that is running."""
        return self._progress

    def optimize(self, batch: TrainBatch, metrics: Metrics) -> None:
        """Take all optimizer steps of one rollout step."""
        num_rows = self.config.epochs * len(self._rows_with_gradient(batch))
        self._progress = StageProgress(total=num_rows)
        for _ in range(self.config.epochs):
            for minibatch in minibatches(batch, self.config.minibatches):
                counts = self._count_tokens(minibatch)
                if counts.tokens:
                    self._optimizer_step(minibatch, counts, metrics)

    def old_and_ref_logprobs(self, batch: TokenBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N, C] logprobs of these rows under policy and reference, 0 on other rows."""
        old = self._statistics(self.policy.causal_model, batch, rows)
        with self.policy.reference() as reference:
            return old.logprobs, self._statistics(reference, batch, rows).logprobs

    def _statistics(self, model: CausalModel, batch: TokenBatch, rows: Tensor) -> TokenStatistics:
        """Return [N, C] logprobs and entropies of these rows, 0 on other rows, on the CPU."""
        temperature = self.sampling.temperature

        def statistics(part: TokenBatch) -> list[Tensor]:
            return [torch.stack(completion_statistics(model, part, temperature=temperature), -1)]

        values = [torch.zeros(*batch.completion_ids.shape, 2)]
        self._fill(values, statistics, batch, rows, packed=model.uses_packing)
        return TokenStatistics(*values[0].unbind(-1))

    @torch.no_grad()
    def _fill(
        self,
        values: Sequence[Tensor],
        function: Callable[[TokenBatch], Sequence[Tensor]],
        batch: TokenBatch,
        rows: Tensor,
        *,
        packed: bool,
    ) -> None:
        """Fill these rows of [N, C, *] with what a function makes of each micro-batch."""
        self._progress = StageProgress(total=len(rows))
        parts, found = self._micro_batches(batch, rows, packed=packed), []
        for part_rows in parts:
            found.append(function(batch.select(part_rows)))
            self._count(len(part_rows))
        if found:
            for number, value in enumerate(values):
                _copy_to(value, parts, [one[number] for one in found])

    def _count(self, rows: int) -> None:
        self._progress = replace(self._progress, num_done=self._progress.num_done + rows)

    def _count_tokens(self, batch: TrainBatch) -> TokenCounts:
        """Count the tokens of the batch over all ranks."""
        mask = batch.loss_mask
        is_good = torch.tensor(False) if batch.is_good is None else batch.is_good[:, None]
        local = [mask.sum(), mask.any(1).sum(), batch.surrogate_mask.sum(), (mask & is_good).sum()]
        tokens, sequences, entropy_tokens, good_tokens = map(
            int, sum_over_ranks(self.module, local)
        )
        return TokenCounts(
            tokens=tokens,
            sequences=sequences,
            max_tokens=self.sampling.max_tokens,
            local_tokens=int(local[0]),
            num_ranks=self.module.trainer.world_size,
            entropy_tokens=entropy_tokens,
            good_tokens=good_tokens,
        )

    def _optimizer_step(self, batch: TrainBatch, counts: TokenCounts, metrics: Metrics) -> None:
        """Take one optimizer step on the gradient of the whole batch over all ranks."""
        optimizer: Any = self.module.optimizers()
        schedule: Any = self.module.lr_schedulers()
        optimizer.zero_grad()
        rows = self._rows_with_gradient(batch)
        parts = self._micro_batches(batch, rows, packed=self.policy.causal_model.uses_packing)
        entropies = [torch.zeros((), device=self.module.device)]
        for number, rows in enumerate(parts):
            with optimizer.toggle_model(sync_grad=number == len(parts) - 1):
                entropies.append(self._backward(batch.select(rows), counts, number, metrics))
        if not parts:
            with optimizer.toggle_model(sync_grad=True):
                self._backward_nothing(batch)
        norm = self._clipped_gradient_norm()
        # _backward adds the loss of each micro-batch with count 0. With the count added here, the
        # metric is the sum over micro-batches and ranks, averaged over optimizer steps.
        metrics.add("policy/loss", 0.0, 1 / counts.num_ranks)
        metrics.add("policy/grad_norm", norm.detach())
        metrics.add("policy/lr", optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        self._update_entropy_coef(torch.stack(entropies).sum(), counts, metrics)

    def _clipped_gradient_norm(self) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.trainable_parameters(), self.config.max_grad_norm
        )
        if not norm.isfinite():
            raise FloatingPointError(
                f"the gradient of optimizer step {self.module.global_step + 1} is not finite (norm "
                f"{norm}); the step was not applied. {self.objective.advice_if_not_finite}Resume "
                "from the last checkpoint with a lower learning rate or in a higher precision."
            )
        return norm

    def _update_entropy_coef(
        self, entropy_sum: Tensor, counts: TokenCounts, metrics: Metrics
    ) -> None:
        """Adapt the coefficient of the next optimizer step to the entropy of this one."""
        if self.objective.entropy.target is None:
            return
        metrics.add("policy/entropy_coef", self.entropy_control.applied_coef)
        (total,) = sum_over_ranks(self.module, [entropy_sum])
        self.entropy_control = self.entropy_control.after_step(
            total / max(1, counts.entropy_tokens)
        )

    def _backward_nothing(self, batch: TrainBatch) -> None:
        """Join the gradient reduction over ranks when this rank has no row with a gradient."""
        row = batch.select(torch.zeros(1, dtype=torch.long))
        logprobs, _ = completion_statistics(self.policy.causal_model, row)
        self.module.manual_backward(0.0 * logprobs.sum())

    def _rows_with_gradient(self, batch: TrainBatch) -> Tensor:
        """Return the rows that can have a gradient.

        Without a KL or entropy term, a row with advantage 0 has no gradient, so it is skipped.
        """
        trained = batch.loss_mask.any(1)
        if not self.objective.has_gradient_at_zero_advantage:
            has_gradient = batch.advantages_by_token.any(1)
            trained &= has_gradient if batch.is_good is None else has_gradient | batch.is_good
        return trained.nonzero()[:, 0]

    def _micro_batches(self, batch: TokenBatch, rows: Tensor, *, packed: bool) -> list[Tensor]:
        return micro_batches(batch, rows, self.config.max_tokens_per_micro_batch, packed=packed)

    def _backward(
        self, batch: TrainBatch, counts: TokenCounts, number: int, metrics: Metrics
    ) -> Tensor:
        """Accumulate the gradient of a micro-batch; return the sum of its token entropies."""
        entropy_coef = self.entropy_control.applied_coef
        with self.events.stage("micro_batch", number) as details:
            statistics, candidate_logprobs = candidate_statistics(
                self.policy.causal_model,
                batch,
                batch.teacher_ids,
                temperature=self.sampling.temperature,
                entropy_gradient=entropy_coef != 0 or self.objective.function is not None,
            )
            moved = batch.to(self.module.device)
            losses = token_losses(
                *statistics,
                moved,
                counts,
                self.objective,
                entropy_coef=entropy_coef,
                kl_coef=self.kl_control.coef,
                candidate_logprobs=candidate_logprobs,
            )
            # DDP averages gradients over ranks, but this loss is one rank's share of their sum.
            self.module.manual_backward(losses.loss * counts.num_ranks)
            details |= {
                "rows": batch.num_rows,
                "tokens": batch.loss_mask.sum(),
                "pg_loss": (losses.surrogate * losses.weights).sum(),
                "loss": losses.loss.detach(),
            }
            if losses.kl is not None:
                details["kl"] = (losses.kl * losses.weights).sum()
            add_update_metrics(metrics, moved, losses, statistics.entropy)
            metrics.add("policy/loss", details["loss"], 0.0)
        self._count(batch.num_rows)
        return (statistics.entropy.detach() * moved.surrogate_mask).sum()


def _copy_to(values: Tensor, parts: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Copy [n, c, *] values of parts of the rows into [N, C, *], all of them at once."""
    copied = torch.cat([one.flatten(0, 1) for one in found]).to(values.device)
    sizes = [one.shape[:2].numel() for one in found]
    for rows, one, part in zip(parts, found, torch.split(copied, sizes), strict=True):
        values[rows, : one.shape[1]] = part.view(one.shape)


def _rows(mask: Tensor) -> Tensor:
    """Return the rows of [N, C] with a True."""
    return mask.any(1).nonzero()[:, 0]
