"""Collect the rollouts of a step: sample, score, and replace groups whose advantages are all 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import or_

from lit_grpo.distributed.ranks import gather_objects, get_rank
from lit_grpo.objective import AdvantageConfig
from lit_grpo.objective.advantages import compute_advantages
from lit_grpo.rewards.scoring.scoring import Scoring
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.rollout import EngineFailed, RolloutEngine, SampledPolicy, Sampling
from lit_grpo.training.collecting.checked_engine import load_weights
from lit_grpo.training.collecting.pending_rollout import (
    PendingRollout,
    RolloutFactory,
    with_unfinished_tokens,
)
from lit_grpo.training.collecting.prefetch import Prefetcher, StepContext, drop_stale_groups
from lit_grpo.training.collecting.score_gate import OutagePolicy, ScoreGate
from lit_grpo.training.metrics import (
    Metrics,
    add_measurements,
    add_refill_metrics,
    add_rollout_metrics,
    in_group_deviations,
)
from lit_grpo.training.seeds import SeedPurpose, seed_everything
from lit_grpo.training.stages import StageEvents
from lit_grpo.training.waiting import RankWaits, StepAbandoned, abandon_if_failed
from lit_grpo.types import Prompt, RolloutBatch, StageProgress
from lit_grpo.types.errors import EngineBug


class Collector:
    """Turn prompts into scored groups, step after step.

    Args:
        events: Reports stages to callbacks, which may ask for the run to end.
        max_head_offpolicyness: As in ``GRPOModule``.
        optimizer_steps: Optimizer steps of one rollout step.
        max_refill_rounds: Maximum number of rounds of dynamic sampling; 0 turns it off.
    """

    def __init__(
        self,
        events: StageEvents,
        policy: SampledPolicy,
        engine: RolloutEngine,
        rewards: RewardSuite,
        *,
        sampling: Sampling,
        group_size: int,
        advantage: AdvantageConfig,
        outage: OutagePolicy,
        max_head_offpolicyness: int,
        optimizer_steps: int,
        max_refill_rounds: int,
    ) -> None:
        self._events = events
        self._policy = policy
        self._engine = engine
        self._rewards = rewards
        self._advantage = advantage
        self._max_head_offpolicyness = max_head_offpolicyness
        self._max_refill_rounds = max_refill_rounds
        self._waiting = RankWaits(events)
        self._gate = ScoreGate(self._waiting, outage)
        self._factory = RolloutFactory(
            engine=engine, rewards=rewards, sampling=sampling, group_size=group_size
        )
        self._prefetcher = Prefetcher(
            self._factory,
            max_head_offpolicyness=max_head_offpolicyness,
            optimizer_steps=optimizer_steps,
        )

    def load_weights(self, step: StepContext) -> None:
        """Load the policy's weights into the engine before a step's ``collect``.

        Every rank must call this. An engine may run the policy here to check what it has loaded.

        Raises:
            StepAbandoned: the engine gave up or has a bug, or a callback ended the run during the
                wait. Raised on every rank.
        """
        seed_everything(step.seeds.derive(SeedPurpose.ROLLOUT, step.number))
        failure: EngineFailed | EngineBug | None = None
        with self._events.stage("weight_sync"):
            try:
                load_weights(self._engine, self._policy, step.policy_version)
            except (EngineFailed, EngineBug) as error:
                failure = error
            abandon_if_failed(failure)

    def collect(
        self, prompts: Sequence[Prompt], step: StepContext, metrics: Metrics
    ) -> RolloutBatch:
        """Return B scored groups, sampled with the weights loaded; scoring overlaps generation.

        Raises:
            StepAbandoned: the engine gave up or has a bug, too many scores stay missing, or a
                callback ended the run during the wait. Raised on every rank.
        """
        rollouts = self._sample_and_score(self._prefetcher.take(prompts, step))
        assert rollouts is not None, "a step without prompts"
        rollouts = drop_stale_groups(
            rollouts, step.policy_version, self._max_head_offpolicyness, metrics
        )
        add_rollout_metrics(metrics, rollouts)  # of the groups as first sampled
        rollouts = self._refill(rollouts, step, metrics)
        of_engine = self._engine.observe()
        for measured in [*self._rewards.observe(), of_engine]:
            add_measurements(metrics, measured)
        if num_restarts := int(of_engine.totals.get("rollout/restarts", 0)):
            message = f"Restarts of servers during this step: {num_restarts}; see run.log."
            self._events.report_outage("engine_outage", message)
        return rollouts

    def state_dict(self, number: int) -> list[dict[int, dict[str, str]]]:
        """Return by rank what is finished of the rollouts of a step and of those after it.

        It does not wait for the rest. Every rank must call this.
        """
        return gather_objects(self._prefetcher.state_dict(number))

    def load_state_dict(self, state: Sequence[dict[int, dict[str, str]]]) -> None:
        """Restore the rollouts of this rank."""
        rank = get_rank()
        self._prefetcher.load_state_dict(state[rank] if rank < len(state) else {})

    def cancel(self) -> None:
        """Cancel the rollouts of this step and of later ones."""
        self._prefetcher.cancel()

    def _sample_and_score(self, pending: PendingRollout) -> RolloutBatch | None:
        """Return the rollouts once they are sampled and scored; None without prompts.

        Every rank must call this, even without prompts.
        """
        scoring = pending.scoring
        try:
            with self._generation(scoring) if scoring else nullcontext():
                self._waiting.until_done(pending.sample_or_wait)
            scored = scoring.scored if scoring else StageProgress
            with self._events.stage("reward", progress=scored) as details:
                rollouts = self._gate.wait_for_scores(scoring, pending.engine_failure)
                if rollouts is not None and rollouts.valid.any():
                    details |= {
                        "reward_mean": rollouts.rewards[rollouts.valid].mean(),
                        "reward_std": in_group_deviations(rollouts).mean(),
                    }
        except StepAbandoned:
            pending.cancel()
            raise
        return rollouts

    def _generation(self, scoring: Scoring) -> AbstractContextManager[object]:
        def sampled() -> StageProgress:
            return with_unfinished_tokens(scoring.sampled(), self._engine)

        return self._events.stage("generation", progress=sampled)

    def _refill(self, rollouts: RolloutBatch, step: StepContext, metrics: Metrics) -> RolloutBatch:
        """Replace groups whose advantages are all 0 with groups from further prompts.

        Source: dynamic sampling, DAPO, arXiv 2503.14476 section 3.2.
        """
        if not self._max_refill_rounds:
            return rollouts
        num_sampled = len(rollouts.groups)
        for round_number in range(1, self._max_refill_rounds + 1):
            indices = self._groups_without_advantage(rollouts)
            sources = [rollouts.groups[index].prompt.source for index in indices]
            # Every rank takes as many as the one that needs most, to keep the loaders in step.
            needed = reduce(or_, gather_objects(Counter(sources)))
            if not needed:
                break
            taken = {name: iter(found) for name, found in step.loader.take(needed).items()}
            prompts = [next(taken[source]) for source in sources]
            num_sampled += len(prompts)
            seed = step.seeds.derive(SeedPurpose.REFILL, step.number, round_number)
            if fresh := self._sample_and_score(self._factory.create(prompts, seed)):
                rollouts = rollouts.with_groups(indices, fresh)
        num_left = len(self._groups_without_advantage(rollouts))
        add_refill_metrics(metrics, len(rollouts.groups), num_sampled, num_left)
        return rollouts

    def _groups_without_advantage(self, rollouts: RolloutBatch) -> list[int]:
        table = rollouts.reward_table(self._rewards.weights)
        advantages = compute_advantages(table, self._advantage)
        indices: list[int] = (~advantages.any(1)).nonzero()[:, 0].tolist()
        return indices
