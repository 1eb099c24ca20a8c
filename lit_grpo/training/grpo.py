"""GRPO as a LightningModule: rollout -> reward -> advantage -> loss -> optimizer.

Source: GRPO, arXiv 2402.03300 algorithm 1. One ``training_step`` is one rollout step, under
manual optimization. The formulas are in `objective`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import AdamW

from lit_grpo.data import TrainingLoader
from lit_grpo.diagnostics.step_log import StepLog
from lit_grpo.distributed.ranks import gather_objects
from lit_grpo.objective import AdvantageConfig, Objective
from lit_grpo.policy import LocalTeacher
from lit_grpo.policy.body_and_head import num_compilations
from lit_grpo.policy.files.loading import max_positions
from lit_grpo.policy.policy import PolicyOrPath
from lit_grpo.policy.teacher import as_teacher
from lit_grpo.rewards.functions.reward import Rewards
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.rollout import RolloutEngine, Sampling, VLLMTeacher
from lit_grpo.stopping import stop_run
from lit_grpo.training.batch_builder import BatchBuilder
from lit_grpo.training.batching import UpdateConfig
from lit_grpo.training.checks.compatibility import (
    check_group_fits,
    check_overlap,
    check_prompts_fit,
    check_sampling,
    check_teacher,
    refuse_adaptive,
    refuse_contradictions,
)
from lit_grpo.training.checks.end_tokens import check_ends
from lit_grpo.training.checks.unused_settings import settings_without_effect
from lit_grpo.training.collecting.collector import Collector
from lit_grpo.training.collecting.prefetch import StaleGroupsWarning, StepContext
from lit_grpo.training.collecting.score_gate import OutagePolicy
from lit_grpo.training.evaluation import Evaluation
from lit_grpo.training.metrics import Metrics
from lit_grpo.training.optimizer.empty_steps import EmptySteps
from lit_grpo.training.optimizer.learning_rate import Schedule
from lit_grpo.training.resumable_grpo import ResumableGRPO
from lit_grpo.training.seeds import SeedPurpose
from lit_grpo.training.update import PolicyUpdater
from lit_grpo.training.waiting import StepAbandoned
from lit_grpo.types import Prompt, RolloutBatch, StopReason, TrainBatch
from lit_grpo.types.field_types import check_value
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.settings import check_type

log = logging.getLogger(__name__)


@checks_keywords
class GRPOModule(ResumableGRPO):
    """Train a policy on groups of its own completions.

    Args:
        policy: The model to train; in Python, a path or Hub id is accepted, too.
        rewards: Score the completions; the weighted sum of their values is the reward of a
            completion. In Python, functions with TRL's signature are accepted too.
        group_size: Completions per prompt, at least 2.
        sampling: Temperature, token limit and other settings of sampling.
        engine: The rollout engine that samples completions; null samples with the policy itself.
        objective: The loss of an optimizer step.
        teacher: The model that ``objective.distillation`` distils from, in this process or behind
            servers; in Python, a path or Hub id is accepted, too.
        advantage: How rewards become advantages.
        update: How the completions of a rollout step are split into optimizer steps.
        dynamic_sampling_rounds: Maximum number of times that a rollout step replaces groups whose
            advantages are all 0 with groups from further prompts; 0 turns dynamic sampling off.
        outage: What to do with a rollout step whose scores are missing.
        max_head_offpolicyness: Optimizer steps by which the policy may be ahead of the weights
            that sampled the first token of a completion: the bound on staleness, under AReaL's
            name. 0 is synchronous: sample, then update. A higher value lets an engine with its own
            servers sample the next rollout steps during the update.
        optimizer: Builds the optimizer from the trainable parameters. The default suits full
            fine-tuning; LoRA takes about 10 times the learning rate.
        lr_schedule: Schedule of the learning rate over the optimizer steps of the run.
        warmup_steps: Optimizer steps over which the learning rate rises linearly from 0.
        evaluation: How held-out accuracy is measured.
        seed: Seed of all random numbers of the run.

    Raises:
        UserError: a setting is out of range, or settings contradict each other.
    """

    usual_lora_rate = 1e-5

    def __init__(
        self,
        policy: PolicyOrPath,
        rewards: Rewards,
        group_size: int = 8,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        engine: RolloutEngine | None = None,
        objective: Objective = Objective(),  # noqa: B008 - frozen
        teacher: LocalTeacher | VLLMTeacher | None = None,
        advantage: AdvantageConfig = AdvantageConfig(),  # noqa: B008 - frozen
        update: UpdateConfig = UpdateConfig(),  # noqa: B008 - frozen
        dynamic_sampling_rounds: int = 0,
        outage: OutagePolicy = OutagePolicy(),  # noqa: B008 - frozen
        max_head_offpolicyness: int = 0,
        optimizer: OptimizerCallable = lambda params: AdamW(params, lr=1e-6, weight_decay=0.0),
        lr_schedule: Schedule = "constant",
        warmup_steps: int = 0,
        evaluation: Evaluation | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            policy, sampling, engine, optimizer, lr_schedule, warmup_steps, evaluation, seed
        )
        check_type("model.rewards", rewards, (list, tuple))
        check_value("model.group_size", group_size, int)
        check_value("model.dynamic_sampling_rounds", dynamic_sampling_rounds, int)
        check_value("model.max_head_offpolicyness", max_head_offpolicyness, int)
        check_type("model.objective", objective, Objective)
        check_type("model.advantage", advantage, AdvantageConfig)
        check_type("model.update", update, UpdateConfig)
        check_type("model.outage", outage, OutagePolicy)
        self.automatic_optimization = False
        self.rewards = RewardSuite(rewards)
        self.group_size = group_size
        self.objective = objective
        self.teacher = as_teacher(teacher)
        self.advantage = advantage
        self.update = update
        self.dynamic_sampling_rounds = dynamic_sampling_rounds
        self.outage = outage
        self.max_head_offpolicyness = max_head_offpolicyness
        self._check_settings()
        self._build_parts()
        self.rollout_step = 0
        self.empty_steps = EmptySteps()
        self._step_log = StepLog()
        self._stale_groups = StaleGroupsWarning()

    def _check_settings(self) -> None:
        """Refuse settings that are out of range or contradict each other."""
        check_sampling(self.group_size, self.dynamic_sampling_rounds, self.sampling)
        refuse_contradictions(self.policy, self.objective, self.advantage)
        check_teacher(self.teacher, self.objective)
        steps, rounds = self.update.optimizer_steps, self.dynamic_sampling_rounds
        check_overlap(self.max_head_offpolicyness, steps, rounds, self.engine)
        check_group_fits(self.group_size, self.engine)

    def _build_parts(self) -> None:
        """Build the parts of a rollout step: one collects, one builds the batch, one updates."""
        self.collector = Collector(
            self.events,
            self.policy,
            self.engine,
            self.rewards,
            sampling=self.sampling,
            group_size=self.group_size,
            advantage=self.advantage,
            outage=self.outage,
            max_head_offpolicyness=self.max_head_offpolicyness,
            optimizer_steps=self.update.optimizer_steps,
            max_refill_rounds=self.dynamic_sampling_rounds,
        )
        self.batch_builder = BatchBuilder(
            self,
            self.events,
            self.policy,
            sampling=self.sampling,
            objective=self.objective,
            advantage=self.advantage,
            reward_weights=self.rewards.weights,
            config=self.update,
            teacher=self.teacher,
        )
        self.policy_updater = PolicyUpdater(
            self, self.events, self.policy, self.sampling, self.objective, self.update
        )

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        return self.objective.kl.coef > 0

    @property
    def refreshes_reference(self) -> bool:  # type: ignore[override]
        return self.objective.kl.refresh_every is not None

    def load_models(self) -> None:
        super().load_models()
        if self.teacher is not None and self.trainer.state.fn == "fit":
            top_k, temperature = self.objective.distillation.top_k, self.sampling.temperature
            self.teacher.load(self.policy, temperature=temperature, top_k=top_k)

    def optimizer_steps_per_epoch(self, num_batches: int) -> int:
        return num_batches * self.update.optimizer_steps

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            for message in settings_without_effect(self.objective, self.advantage, self.update):
                rank_zero_only(log.warning)(message)
            self.rewards.start(self.reasoning)
            self.record_reward_models()

    def check_loader(self, loader: TrainingLoader) -> None:
        super().check_loader(loader)
        self.rewards.check_sources(loader.sources)
        if self.max_head_offpolicyness:
            refuse_adaptive(loader, "with max_head_offpolicyness, as results come too late")

    def check_start(self) -> None:
        self.record_user_code()
        super().check_start()
        model = self.policy.model
        if warning := check_ends(model, self.tokenizer, self.sampling, self.objective):
            rank_zero_only(log.warning)("%s", warning)
        prompts = self.loader.some_prompts()
        check_prompts_fit(max_positions(model.config), self.sampling, prompts)
        if self.teacher is not None:
            check_prompts_fit(self.teacher.max_positions, self.sampling, prompts, "teacher")
        self.rewards.check(prompts)

    def record_spending(self, run_dir: Path) -> None:
        super().record_spending(run_dir)
        self.rewards.record_spending(run_dir)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.teacher is not None:
            self.teacher.to(self.device)

    def close(self) -> None:
        self.collector.cancel()
        self.rewards.close()
        if self.teacher is not None:
            self.teacher.close()
        super().close()

    @property
    def loader(self) -> TrainingLoader:
        """The stateful loader of the training prompts."""
        return cast(TrainingLoader, self.trainer.train_dataloader)

    def training_step(self, prompts: Sequence[Prompt], batch_idx: int) -> dict[str, Any] | None:
        """Run one rollout step: sample, score, compute advantages, update.

        Return None if the step was abandoned.
        """
        metrics = Metrics()
        if not self.max_head_offpolicyness:  # rows sampled ahead keep their scores in a checkpoint
            self.rewards.begin_step()
        try:
            rollouts = self.collect(prompts, metrics)
            batch = self.build_train_batch(rollouts, metrics)
        except StepAbandoned as abandoned:
            self._stop_before_step(abandoned.reason)
            return None
        trained = self.update_policy(rollouts, batch, metrics)
        self.rollout_step += 1
        self.rewards.end_step()
        self.refresh_reference()
        self._record_in_loader(rollouts, metrics)
        values = metrics.merged()
        self._adapt_kl(values)
        self._log_step(values)
        return {"rollouts": rollouts, "batch": trained, "metrics": values}

    def collect(self, prompts: Sequence[Prompt], metrics: Metrics) -> RolloutBatch:
        """Return B scored groups; scoring overlaps generation."""
        max_steps = self.trainer.max_steps
        step = StepContext(
            number=self.rollout_step,
            policy_version=self.policy_version,
            max_policy_version=max_steps + self.num_rollbacks if max_steps > 0 else None,
            seeds=self.seeds,
            loader=self.loader,
        )
        self.collector.load_weights(step)
        with self.whole_policy():
            return self.collector.collect(prompts, step, metrics)

    def build_train_batch(self, rollouts: RolloutBatch, metrics: Metrics) -> TrainBatch | None:
        """Return the batch with advantages, old and reference logprobs.

        Return None if no rank has a token to train on.

        Raises:
            StepAbandoned: the teacher of any rank cannot read the completions.
        """
        return self.batch_builder.build(
            rollouts,
            kl_coef=self.policy_updater.coefficients.kl.coef,
            seed=self.seeds.derive(SeedPurpose.COVARIANCE, self.rollout_step),
            metrics=metrics,
        )

    def update_policy(
        self, rollouts: RolloutBatch, batch: TrainBatch | None, metrics: Metrics
    ) -> TrainBatch | None:
        """Take the step's optimizer steps, and return the batch they were taken on.

        Return None for a step without a token to train on, and for one that a callback skips.
        """
        if batch is None:
            self._count_empty_step()
            return None
        if reason := self.events.reason_to_skip_update(rollouts):
            metrics.add("policy/skipped_fraction", 1.0)
            self._count_empty_step(why=f"{reason}.", cause=reason.cause)
            return None
        self.empty_steps.reset()
        self.take_optimizer_steps(batch, metrics)
        return batch

    def _adapt_kl(self, values: dict[str, float]) -> None:
        """Set the KL coefficient of the next step; add that of this one to its metrics."""
        num_rows = self.group_size * self.loader.batch_size
        self.policy_updater.coefficients.adapt_kl(values, num_rows)

    def _log_step(self, values: Mapping[str, float]) -> None:
        self._step_log.log(self, values)
        self._stale_groups.warn_once(values.get("rollout/stale_fraction", 0.0), self.rollout_step)

    def _count_empty_step(self, **reason: str) -> None:
        stop = self.empty_steps.count(self.rollout_step + 1, **reason)
        if stop is not None:
            stop_run(self.trainer, stop)

    def take_optimizer_steps(self, batch: TrainBatch, metrics: Metrics) -> None:
        """Take the optimizer steps; nothing else changes parameters."""
        with self.events.stage("update", progress=self.policy_updater.progress):
            self.policy_updater.optimize(batch, metrics)
            if self.policy.compile_forward:
                metrics.maximum("perf/num_compilations", num_compilations())

    def _record_in_loader(self, rollouts: RolloutBatch, metrics: Metrics) -> None:
        """Tell an adaptive loader the step's results, and take the loader's metrics."""
        if self.loader.is_adaptive:
            self.loader.record([*chain.from_iterable(gather_objects(rollouts.results))])
        for name, value in self.loader.metrics().items():
            metrics.maximum(name, value)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop a run that has diverged, unless a callback has rolled it back.

        Its checkpoint has the weights before the steps that were skipped.
        """
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.skipped_steps.num_at_limit:
            stop_run(self.trainer, self.skipped_steps.stop_reason())

    @property
    def trouble(self) -> str:
        """Current trouble, which `Checkpoints` asks for; empty if there is none."""
        num_skipped = self.skipped_steps.in_a_row
        return f"{num_skipped} optimizer steps in a row were skipped" if num_skipped else ""

    def refresh_reference(self) -> None:
        """Move the reference towards the policy every ``kl.refresh_every`` rollout steps."""
        kl = self.objective.kl
        if kl.refresh_every and self.rollout_step % kl.refresh_every == 0:
            self.policy.refresh_reference(kl.refresh_mix)

    def _stop_before_step(self, reason: StopReason) -> None:
        """End the run as if this step had not begun; a resumed run repeats it."""
        stop_run(self.trainer, reason)
        self._step_log.log(self, {})
        self.loader.rewind()
