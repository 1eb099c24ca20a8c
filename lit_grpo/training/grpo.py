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

from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lit_grpo.distributed import gather_rewards
from lit_grpo.objective import AdvantageConfig, Objective
from lit_grpo.objective.advantages import compute_advantages
from lit_grpo.objective.kl import kl_in_reward
from lit_grpo.policy import Policy
from lit_grpo.policy.body_and_head import num_compilations
from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring import RewardSuite
from lit_grpo.rollout import RolloutEngine, Sampling
from lit_grpo.stopping import stop_run
from lit_grpo.training.base import PolicyModule, Schedule, default_optimizer
from lit_grpo.training.batching import UpdateConfig, collate_rollouts
from lit_grpo.training.collector import Collector
from lit_grpo.training.evaluation import Evaluation
from lit_grpo.training.metrics import Metrics, add_advantage_metrics
from lit_grpo.training.score_gate import OutagePolicy, StepAbandoned
from lit_grpo.training.stages import in_stage
from lit_grpo.training.update import PolicyUpdate
from lit_grpo.types import Prompt, RolloutBatch, StopReason, TrainBatch, UserError

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
        dynamic_sampling_rounds: How often a rollout step may put groups of further prompts in the
            place of those whose advantages are all 0; 0 trains on what was sampled first.
        outage: What becomes of a rollout step whose scores are absent.
        max_head_offpolicyness: Optimizer steps that the policy may be ahead of the weights that
            wrote a completion's first token. 0 samples, then updates; more lets an engine that
            can sample the next rollout steps during the update.
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
        dynamic_sampling_rounds: int = 0,
        outage: OutagePolicy = OutagePolicy(),  # noqa: B008 - frozen
        max_head_offpolicyness: int = 0,
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
            raise UserError(
                f"group_size must be >= 2, got {group_size} (a group of one has no baseline). "
                "Set model.group_size."
            )
        if dynamic_sampling_rounds < 0:
            raise UserError(
                f"dynamic_sampling_rounds must be >= 0, got {dynamic_sampling_rounds} (0 trains on "
                "what was sampled first). Set model.dynamic_sampling_rounds."
            )
        if sampling.is_greedy:
            raise UserError(
                "sampling.temperature must be > 0 in training, got 0 (identical completions have "
                "no advantage over each other). Set model.sampling.temperature."
            )
        _refuse_contradictions(policy, objective, advantage)
        _check_overlap(
            max_head_offpolicyness, update.optimizer_steps, dynamic_sampling_rounds, self.engine
        )
        self.automatic_optimization = False
        self.rewards = RewardSuite(rewards)
        self.group_size = group_size
        self.objective = objective
        self.advantage = advantage
        self.update = update
        self.dynamic_sampling_rounds = dynamic_sampling_rounds
        self.collector = Collector(self, outage, max_head_offpolicyness)
        self.updater = PolicyUpdate(self, policy, sampling, objective, update)
        self.rollout_step = 0
        self._logged_names: dict[str, float] = {}

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        return self.objective.kl.coef > 0

    @property
    def moves_reference(self) -> bool:  # type: ignore[override]
        return self.objective.kl.refresh_every is not None

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
        self.collector.close()
        self.rewards.close()
        super().close()

    # The step

    def training_step(self, prompts: Sequence[Prompt], batch_idx: int) -> dict[str, Any] | None:
        """rollout -> reward -> advantage -> loss -> optimizer; None for a step that is not made."""
        metrics = Metrics()
        try:
            rollouts = self.collect(prompts, metrics)
        except StepAbandoned as abandoned:
            self._end_before_this_step(abandoned.reason)
            return None
        batch = self.build_train_batch(rollouts, metrics)
        if batch is not None:
            self.update_policy(batch, metrics)
        self.rollout_step += 1
        self.refresh_reference()
        values = metrics.merged()
        # Lightning would log the last value of a name once more where a step has none.
        self._logged_names |= dict.fromkeys(values, math.nan)
        self.log_dict(self._logged_names | values)
        return {"rollouts": rollouts, "batch": batch, "metrics": values}

    def collect(self, prompts: Sequence[Prompt], metrics: Metrics) -> RolloutBatch:
        """B scored groups; scoring overlaps generation."""
        return self.collector.collect(prompts, metrics)

    def _end_before_this_step(self, reason: StopReason) -> None:
        stop_run(self.trainer, reason)
        self.log_dict(self._logged_names)  # or the row would repeat the values of the last step
        self.trainer.train_dataloader.rewind()  # type: ignore[union-attr]

    def build_train_batch(self, rollouts: RolloutBatch, metrics: Metrics) -> TrainBatch | None:
        """Advantages, old and reference logprobs; None when no rank has a token to train on."""
        batch = collate_rollouts(
            rollouts,
            pad_id=self.tokenizer.pad_token_id,
            overlong_filtering=self.objective.overlong_filtering,
        ).to(self.device)
        if self.updater.count_tokens(batch).tokens == 0:
            log.warning(
                "rollout step %d has no token to train on, so no optimizer step is taken: every "
                "row is invalid, alone in its group or filtered. See reward/valid_fraction and "
                "the outcomes in completions/.",
                self.rollout_step,
            )
            return None
        if self.objective.kl.is_in_reward:
            rollouts, batch = self._with_kl_in_reward(rollouts, batch, metrics)
        advantages = self._advantages(rollouts)
        add_advantage_metrics(metrics, advantages, batch.loss_mask.any(1).cpu())
        return self._with_fixed_logprobs(
            replace(batch, advantages=advantages.float().to(self.device))
        )

    def _advantages(self, rollouts: RolloutBatch) -> Tensor:
        """[N] of this rank's rows, among the rewards of all ranks."""
        everywhere = gather_rewards(self, rollouts)
        advantages = compute_advantages(everywhere, self.rewards.weights, self.advantage)
        return advantages.tensor_split(self.trainer.world_size)[self.global_rank].flatten()

    @in_stage("logprob")
    def _with_kl_in_reward(
        self, rollouts: RolloutBatch, batch: TrainBatch, metrics: Metrics
    ) -> tuple[RolloutBatch, TrainBatch]:
        """Rewards less their completions' divergence, and the old logprobs that it took."""
        valid = rollouts.valid.flatten()[:, None].to(self.device)
        voting = replace(batch, loss_mask=batch.completion_mask & valid)  # filtered ones too
        old = self.updater.statistics(self.policy.causal_model, voting, every_row=True).logprobs
        reference = self.updater.reference_logprobs(voting, every_row=True)
        penalty = kl_in_reward(old, reference, voting.loss_mask, self.objective.kl)
        metrics.add("policy/kl", penalty.sum() / self.objective.kl.coef, voting.loss_mask.sum())
        penalised = rollouts.rewards - penalty.double().cpu().view_as(rollouts.rewards)
        return replace(rollouts, rewards=penalised), replace(batch, old_logprobs=old)

    @in_stage("logprob")
    def _with_fixed_logprobs(self, batch: TrainBatch) -> TrainBatch:
        return self.updater.with_fixed_logprobs(batch)

    @in_stage("update")
    def update_policy(self, batch: TrainBatch, metrics: Metrics) -> None:
        """The only place where parameters change."""
        self.updater.run(batch, metrics)
        if self.policy.compile_forward:
            metrics.maximum("perf/num_compilations", num_compilations())

    def refresh_reference(self) -> None:
        """Move the reference towards the policy where the objective says so."""
        kl = self.objective.kl
        if kl.refresh_every and self.rollout_step % kl.refresh_every == 0:
            self.policy.refresh_reference(kl.refresh_mix)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["rollout_step"] = self.rollout_step
        checkpoint["rewards"] = self.rewards.state_dict()
        control = self.updater.entropy_control
        checkpoint["entropy_control"] = {"coef": control.coef, "last_entropy": control.last_entropy}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.rollout_step = checkpoint["rollout_step"]
        self.rewards.load_state_dict(checkpoint["rewards"])
        self.updater.entropy_control = replace(
            self.updater.entropy_control, **checkpoint["entropy_control"]
        )


def _check_overlap(
    max_head_offpolicyness: int, optimizer_steps: int, rounds: int, engine: RolloutEngine
) -> None:
    """Whether rollouts can be sampled ahead as far as they may.

    Raises:
        ValueError: why not, and what to set.
    """
    if 0 < max_head_offpolicyness < optimizer_steps or max_head_offpolicyness < 0:
        raise UserError(
            f"max_head_offpolicyness must be 0 or >= update.epochs * update.minibatches = "
            f"{optimizer_steps}, got {max_head_offpolicyness} (rollouts that are sampled during an "
            "update are so many optimizer steps old after it). Set model.max_head_offpolicyness."
        )
    if max_head_offpolicyness and not engine.overlaps_updates:
        raise UserError(
            f"max_head_offpolicyness must be 0 with {type(engine).__name__}, got "
            f"{max_head_offpolicyness} (it samples with the weights that are being updated, or on "
            "their device). Set model.max_head_offpolicyness to 0, or model.engine to an engine "
            "with servers of its own."
        )
    if max_head_offpolicyness and rounds:
        raise UserError(
            f"max_head_offpolicyness must be 0 with dynamic_sampling_rounds, got "
            f"{max_head_offpolicyness} and {rounds} (replacing groups takes the prompts that are "
            "under way already). Set one of them to 0."
        )


def _refuse_contradictions(
    policy: Policy, objective: Objective, advantage: AdvantageConfig
) -> None:
    """Choices that are possible by themselves and not together.

    Raises:
        ValueError: which, and what to set.
    """
    if policy.lora is not None and objective.kl.refresh_mix < 1:
        raise UserError(
            f"objective.kl.refresh_mix must be 1 under LoRA, got {objective.kl.refresh_mix} (the "
            "average of two adapters' factors is not the adapter of the average). Set "
            "model.objective.kl.refresh_mix to 1."
        )
    if objective.kl.place == "reward" and advantage.deviation == "mean":
        raise UserError(
            "objective.kl.place: reward takes the divergence off the rewards, and "
            "advantage.deviation: mean needs rewards >= 0. Set model.objective.kl.place to loss."
        )
    if objective.kl.place == "reward" and advantage.combine == "normalise_then_sum":
        raise UserError(
            "objective.kl.place: reward takes the divergence off the sum of the rewards, and "
            "advantage.combine: normalise_then_sum makes no such sum. Set one of them otherwise."
        )
