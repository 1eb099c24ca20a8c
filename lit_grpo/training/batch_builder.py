"""Build the batch that the policy is updated on from the rollouts of a step.

It adds the advantages, and the logprobs of the old policy, the reference and the teacher that the
objective needs. The formulas are in `objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import lightning as L
import torch
from torch import Tensor

from lit_grpo.distributed.ranks import gather_objects, gather_rewards, max_over_ranks
from lit_grpo.objective import AdvantageConfig, Objective
from lit_grpo.objective.advantages import compute_advantages
from lit_grpo.objective.kl import kl_in_reward
from lit_grpo.objective.token_advantages import token_advantages
from lit_grpo.policy import Policy
from lit_grpo.policy.logprobs import CausalModel, TokenStatistics, completion_statistics
from lit_grpo.policy.teacher import Teacher, TeacherFailed
from lit_grpo.rollout import Sampling
from lit_grpo.training.batching import (
    UpdateConfig,
    collate_rollouts,
    collate_token_rewards,
    count_tokens,
    first_row,
    micro_batches,
    rows_with_gradient,
    to_train_batch,
    trained_rows,
)
from lit_grpo.training.metrics import Metrics, add_advantage_metrics
from lit_grpo.training.stages import StageEvents
from lit_grpo.training.token_selection import select_tokens
from lit_grpo.training.waiting import RankWaits, abandon_if_failed
from lit_grpo.types import RolloutBatch, StageProgress, TokenBatch, TrainBatch


class BatchBuilder:
    """Build batches to train on.

    Args:
        module: For communication between ranks.
        events: Reports the forward passes to callbacks.
        reward_weights: Name of a reward -> its weight in the sum.
        config: As for the update.
        teacher: The teacher, if the objective has a distillation term.
    """

    def __init__(
        self,
        module: L.LightningModule,
        events: StageEvents,
        policy: Policy,
        *,
        sampling: Sampling,
        objective: Objective,
        advantage: AdvantageConfig,
        reward_weights: Mapping[str, float],
        config: UpdateConfig,
        teacher: Teacher | None,
    ) -> None:
        self._module = module
        self._events = events
        self._waiting = RankWaits(events)
        self._policy = policy
        self._sampling = sampling
        self._objective = objective
        self._advantage = advantage
        self._weights = reward_weights
        self._config = config
        self._teacher = teacher
        self._progress = StageProgress()

    def build(
        self, rollouts: RolloutBatch, *, kl_coef: float, seed: int, metrics: Metrics
    ) -> TrainBatch | None:
        """Return the batch of this rank; None if no rank has a token to train on.

        Args:
            kl_coef: Coefficient of a KL divergence in the reward.
            seed: Seed of what is drawn at random.

        Raises:
            StepAbandoned: the teacher of any rank cannot read the completions.
        """
        objective = self._objective
        tokens = collate_rollouts(rollouts, pad_id=self._policy.tokenizer.pad_token_id)
        trained = trained_rows(rollouts, overlong_filtering=objective.overlong_filtering)
        is_good = None
        if objective.sft.coef > 0:  # NaN >= x is False: no invalid rows
            is_good = trained & (rollouts.rewards.flatten() >= objective.sft.min_reward)
        penalty = old_logprobs = None
        if objective.kl.is_in_reward:
            divergence, old_logprobs = self._kl_in_reward(rollouts, tokens, metrics)
            penalty = kl_coef * divergence
        advantages = self._advantages(rollouts, tokens, penalty)
        by_token = tokens.completion_mask & trained[:, None]
        add_advantage_metrics(metrics, advantages, trained if advantages.ndim == 1 else by_token)
        batch = to_train_batch(
            tokens,
            rollouts,
            trained=trained,
            advantages=advantages,
            old_logprobs=old_logprobs,
            is_good=is_good,
        )
        if not count_tokens(self._module, batch, self._sampling.max_tokens).tokens:
            return None
        with self._events.stage("logprob", progress=self.progress):
            return self._with_teacher(self._with_reference(self._with_old_policy(batch, seed)))

    def progress(self) -> StageProgress:
        """Return how many rows have been through the forward pass that is running."""
        return self._progress

    def _advantages(
        self, rollouts: RolloutBatch, tokens: TokenBatch, penalty: Tensor | None
    ) -> Tensor:
        """Return [N] or [N, C] advantages of this rank's rows; batch statistics are over all ranks.

        Args:
            penalty: [N, C] KL penalty per token, subtracted from the reward.
        """
        if self._advantage.discount is not None:
            by_token = collate_token_rewards(rollouts, self._weights, tokens)
            if penalty is not None:
                by_token = replace(by_token, values=by_token.values - penalty)
            return token_advantages(
                by_token, self._advantage, lambda own: torch.cat(gather_objects(own))
            )
        if penalty is not None:
            penalised = rollouts.rewards - penalty.sum(1).view_as(rollouts.rewards)
            rollouts = replace(rollouts, rewards=penalised)
        table = gather_rewards(self._module, rollouts.reward_table(self._weights))
        advantages = compute_advantages(table, self._advantage)
        trainer = self._module.trainer
        return advantages.tensor_split(trainer.world_size)[trainer.global_rank].flatten()

    def _kl_in_reward(
        self, rollouts: RolloutBatch, tokens: TokenBatch, metrics: Metrics
    ) -> tuple[Tensor, Tensor]:
        """Return [N, C] float64 divergences from the reference, and the old logprobs."""
        mask = tokens.completion_mask & rollouts.valid.flatten()[:, None]
        rows = _rows(mask)  # overlong rows as well: they count in the group mean
        with self._events.stage("logprob", progress=self.progress):
            old = self._statistics(self._policy.body_and_head, tokens, rows).logprobs
            with self._policy.reference() as reference:
                ref = self._statistics(reference, tokens, rows).logprobs
        divergence = kl_in_reward(old, ref, mask, self._objective.kl)
        metrics.add("policy/kl", divergence.sum(), mask.sum())
        return divergence.double(), old

    def _with_old_policy(self, batch: TrainBatch, seed: int) -> TrainBatch:
        """Add the logprobs of the policy before its update, and masks of tokens made of them.

        With one optimizer step per rollout step the old logprobs equal the current ones, so no
        forward pass is made for them.
        """
        objective = self._objective
        selects_tokens = objective.top_entropy_fraction < 1 or objective.covariance is not None
        is_compared = self._config.optimizer_steps > 1 and objective.old_logprobs == "policy"
        if not selects_tokens and not (is_compared and batch.old_logprobs is None):
            return batch
        rows = _rows(batch.loss_mask) if selects_tokens else rows_with_gradient(batch, objective)
        old = self._statistics(self._policy.body_and_head, batch, rows)
        batch = replace(batch, old_logprobs=old.logprobs)
        return select_tokens(batch, old.entropy, objective, seed)

    def _with_reference(self, batch: TrainBatch) -> TrainBatch:
        """Add the logprobs of the reference, if the loss has a KL term."""
        if not self._objective.kl.is_in_loss:
            return batch
        with self._policy.reference() as reference:
            rows = rows_with_gradient(batch, self._objective)
            statistics = self._statistics(reference, batch, rows)
        return replace(batch, ref_logprobs=statistics.logprobs)

    def _with_teacher(self, batch: TrainBatch) -> TrainBatch:
        """Add the logprobs of the teacher, of the sampled tokens or of its most likely ones.

        Raises:
            StepAbandoned: the teacher of any rank cannot read the completions, or a callback ended
                the run during the wait.
        """
        teacher, top_k = self._teacher, self._objective.distillation.top_k
        if teacher is None:
            return batch
        shape = batch.completion_ids.shape
        values = [torch.zeros(shape)]
        if top_k is not None:
            top_k = min(top_k, self._policy.body_and_head.vocab_size)
            values = [torch.zeros(*shape, top_k, dtype=torch.int32), torch.zeros(*shape, top_k)]
        failure: TeacherFailed | None = None
        rows = rows_with_gradient(batch, self._objective)
        teacher.on_wait = self._waiting.join_round
        try:
            self._fill(
                values, teacher.read, batch, rows, packed=teacher.uses_packing, is_collective=False
            )
        except TeacherFailed as error:
            failure = error
        self._waiting.until_done(lambda _: True)
        abandon_if_failed(failure)
        ids = None if top_k is None else values[0]
        return replace(batch, teacher_ids=ids, teacher_logprobs=values[-1])

    def _statistics(self, model: CausalModel, batch: TokenBatch, rows: Tensor) -> TokenStatistics:
        """Return [N, C] logprobs and entropies of these rows, 0 on other rows, on the CPU."""
        temperature = self._sampling.temperature

        def statistics(part: TokenBatch) -> list[Tensor]:
            return [torch.stack(completion_statistics(model, part, temperature=temperature), -1)]

        values = [torch.zeros(*batch.completion_ids.shape, 2)]
        self._fill(
            values,
            statistics,
            batch,
            rows,
            packed=model.uses_packing,
            is_collective=model.is_sharded,
        )
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
        is_collective: bool,
    ) -> None:
        """Fill these rows of [N, C, *] with what a function makes of each micro-batch.

        Args:
            is_collective: Whether every rank must call the function equally often.
        """
        self._progress = StageProgress(total=len(rows))
        found, max_tokens = [], self._config.max_tokens_per_micro_batch
        parts = micro_batches(batch, rows, max_tokens, packed=packed)
        num_passes = max_over_ranks(len(parts)) if is_collective else len(parts)
        for part in parts:
            found.append(function(batch.select(part)))
            self._progress = self._progress.advanced(len(part))
        for _ in range(num_passes - len(parts)):
            function(first_row(batch))
        if found:
            for number, value in enumerate(values):
                _copy_to(value, parts, [one[number] for one in found])


def _copy_to(values: Tensor, parts: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Copy [n, c, *] values of parts of the rows into [N, C, *], all of them at once."""
    copied = torch.cat([one.flatten(0, 1) for one in found]).to(values.device)
    sizes = [one.shape[:2].numel() for one in found]
    for rows, one, part in zip(parts, found, torch.split(copied, sizes), strict=True):
        values[rows, : one.shape[1]] = part.view(one.shape)


def _rows(mask: Tensor) -> Tensor:
    """Return the rows of [N, C] with a True."""
    return mask.any(1).nonzero()[:, 0]
