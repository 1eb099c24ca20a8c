"""Prompts to scored groups: generation, scoring beside it, and groups that replace those without
signal. Changes no parameter and knows no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lit_grpo.distributed import gather_objects
from lit_grpo.objective.advantages import compute_advantages
from lit_grpo.rollout import EngineFailed
from lit_grpo.training.metrics import (
    Metrics,
    add_measurements,
    add_refill_metrics,
    add_rollout_metrics,
)
from lit_grpo.training.pending import Flight, Flights, without_stale_groups
from lit_grpo.training.score_gate import (
    OutagePolicy,
    ScoreGate,
    StepAbandoned,
    refuse_failed_engines,
)
from lit_grpo.training.seeds import SeedPurpose, seed_everything
from lit_grpo.training.stages import stage
from lit_grpo.types import Prompt, RolloutBatch

if TYPE_CHECKING:
    from lit_grpo.training.grpo import GRPOModule


class Collector:
    """Collects the rollouts of one step after the other."""

    def __init__(
        self, module: GRPOModule, outage: OutagePolicy, max_head_offpolicyness: int
    ) -> None:
        self._module = module
        self._outages = ScoreGate(module, outage)
        self._flights = Flights(module, max_head_offpolicyness)

    def collect(self, prompts: Sequence[Prompt], metrics: Metrics) -> RolloutBatch:
        """B scored groups; scoring overlaps generation.

        Raises:
            StepAbandoned: the engine gave up, too many scores are absent, or the run was asked to
                end meanwhile.
        """
        module = self._module
        seed_everything(module.derive_seed(SeedPurpose.ROLLOUT, module.rollout_step))
        with stage(module, "weight_sync"):
            refuse_failed_engines(self._load_weights())
        rollouts = self._scored(self._flights.present(prompts))
        assert rollouts is not None
        limit = self._flights.max_head_offpolicyness
        rollouts = without_stale_groups(rollouts, module.global_step, limit, metrics)
        add_rollout_metrics(metrics, rollouts)
        if module.dynamic_sampling_rounds:
            rollouts = self._refill(rollouts, metrics)
        for observed in [*module.rewards.observe(), module.engine.observe()]:
            add_measurements(metrics, observed)
        return rollouts

    def close(self) -> None:
        """Forget what is under way for later steps."""
        self._flights.cancel()

    def _load_weights(self) -> str:
        """Why the engine does not have them; empty when it does."""
        try:
            self._module.engine.load_weights(self._module.policy, self._module.global_step)
        except EngineFailed as error:
            return str(error)
        return ""

    def _scored(self, flight: Flight) -> RolloutBatch | None:
        """None without prompts; every rank must call it, also without any."""
        module = self._module
        try:
            with stage(module, "generation") if flight.prompts else nullcontext():
                self._outages.await_completions(flight.land)
            with stage(module, "reward") as details:
                rollouts = self._outages.await_scores(flight.scoring, flight.failure)
                if rollouts is not None and rollouts.valid.any():
                    rewards = rollouts.rewards[rollouts.valid]
                    details |= {
                        "reward_mean": rewards.mean(),
                        "reward_std": rewards.std(correction=0),
                    }
        except StepAbandoned:
            flight.cancel()
            raise
        return rollouts

    def _refill(self, rollouts: RolloutBatch, metrics: Metrics) -> RolloutBatch:
        """Put groups of further prompts in the place of those without an advantage.

        Source: dynamic sampling, DAPO, arXiv 2503.14476 section 3.2.
        """
        module = self._module
        loader: Any = module.trainer.train_dataloader
        num_sampled = len(rollouts.groups)
        for round in range(1, module.dynamic_sampling_rounds + 1):
            places = self._without_signal(rollouts)
            num_missing = max(gather_objects(len(places)))
            if num_missing == 0:
                break
            prompts = loader.take(num_missing)[: len(places)]
            num_sampled += len(prompts)
            seed = module.derive_seed(SeedPurpose.REFILL, module.rollout_step, round)
            if fresh := self._scored(Flight(module, prompts, seed)):
                rollouts = rollouts.with_groups(places, fresh)
        left = len(self._without_signal(rollouts))
        add_refill_metrics(metrics, len(rollouts.groups), num_sampled, left)
        return rollouts

    def _without_signal(self, rollouts: RolloutBatch) -> list[int]:
        module = self._module
        advantages = compute_advantages(rollouts, module.rewards.weights, module.advantage)
        return (~advantages.any(1)).nonzero()[:, 0].tolist()
