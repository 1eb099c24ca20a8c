"""Sample the rollouts of later steps while the policy is updated, and bound their staleness."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.data import TrainingLoader
from lit_grpo.diagnostics.step_findings import describe_stale
from lit_grpo.training.collecting.pending_rollout import PendingRollout, RolloutFactory
from lit_grpo.training.collecting.saved_rollouts import from_text, to_text
from lit_grpo.training.metrics import Metrics
from lit_grpo.training.seeds import SeedPurpose, Seeds
from lit_grpo.types import Prompt, RolloutBatch
from lit_grpo.types.rollouts import ScoredCompletion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """Number, policy version, seeds and data loader of the current rollout step."""

    number: int
    """Number of rollout steps before this one."""
    policy_version: int
    """Version of the weights before this step: optimizer steps and rollbacks so far."""
    max_policy_version: int | None
    """Version at the end of the run if no rollback follows; None without ``trainer.max_steps``."""
    seeds: Seeds
    loader: TrainingLoader
    """Supplies the prompts of later steps and of replacement groups."""


class Prefetcher:
    """Sample the rollouts of later steps while the policy is being updated on the current one.

    Source: bounded staleness, AReaL, arXiv 2505.24298 section 4.

    Args:
        max_head_offpolicyness: As in ``GRPOModule``.
        optimizer_steps: Optimizer steps of one rollout step.
    """

    def __init__(
        self, factory: RolloutFactory, *, max_head_offpolicyness: int, optimizer_steps: int
    ) -> None:
        self._factory = factory
        self._max_head_offpolicyness = max_head_offpolicyness
        self._optimizer_steps = optimizer_steps
        self._num_ahead = max_head_offpolicyness // optimizer_steps
        self._rollouts: dict[int, PendingRollout] = {}
        """Number of a rollout step, this one or a later one -> what is sampled for it."""
        self._saved: dict[int, dict[str, str]] = {}
        """Number of a rollout step -> what a checkpoint has for it, until that is created."""

    def take(self, prompts: Sequence[Prompt], step: StepContext) -> PendingRollout:
        """Return this step's rollout, and start the next steps' that may be sampled now."""
        if not self._num_ahead:
            return self._create(prompts, step, step.number)
        for number in [one for one in self._rollouts if one < step.number]:
            del self._rollouts[number]
        if step.number in self._rollouts and self._rollouts[step.number].prompts != list(prompts):
            self.cancel()  # the loader has moved to a different position
        self._start(prompts, step, step.number)
        for offset in range(1, 1 + self._num_ahead):
            if not self._is_beyond_the_end(step, offset):
                self._start(step.loader.peek(offset), step, step.number + offset)
        return self._rollouts[step.number]

    def cancel(self) -> None:
        """Cancel the rollouts of this step and later ones, and forget a checkpoint's."""
        for pending in self._rollouts.values():
            pending.cancel()
        self._rollouts.clear()
        self._saved.clear()

    def state_dict(self, first: int) -> dict[int, dict[str, str]]:
        """Return what is finished so far of the rollouts of a step and of those after it."""
        state = self._saved | {
            number: {"made_of": self._digest(pending.prompts), "rows": to_text(rows)}
            for number, pending in self._rollouts.items()
            if (rows := pending.finished())
        }
        return {number: one for number, one in state.items() if number >= first}

    def load_state_dict(self, state: Mapping[int, dict[str, str]]) -> None:
        """Let the rollouts of these steps begin with what was finished."""
        self._saved = dict(state)

    def _is_beyond_the_end(self, step: StepContext, offset: int) -> bool:
        """Return whether the run ends before the rollout step ``offset`` steps ahead."""
        last = step.max_policy_version
        return last is not None and step.policy_version + offset * self._optimizer_steps >= last

    def _start(self, prompts: Sequence[Prompt], step: StepContext, number: int) -> None:
        """Start the rollout of a step unless that has been done."""
        if number not in self._rollouts:
            self._rollouts[number] = self._create(prompts, step, number)
            self._rollouts[number].start()

    def _create(self, prompts: Sequence[Prompt], step: StepContext, number: int) -> PendingRollout:
        rows = self._take_saved(prompts, number)
        # The rows that are left must not repeat the random numbers of those that are finished.
        seed = step.seeds.derive(SeedPurpose.ROLLOUT, number, *([len(rows)] if rows else []))
        return self._factory.create(prompts, seed, rows)

    def _take_saved(self, prompts: Sequence[Prompt], number: int) -> dict[int, ScoredCompletion]:
        """Return the finished rows that a checkpoint has of a rollout; none if it was another."""
        saved = self._saved.pop(number, None)
        if saved is None:
            return {}
        if saved["made_of"] != self._digest(prompts):
            rank_zero_only(log.info)(
                "rollout step %d is sampled again: the checkpoint's rows come from different "
                "prompts or settings",
                number + 1,
            )
            return {}
        rows = from_text(saved["rows"])
        rank_zero_only(log.info)(
            "rollout step %d goes on with the %d of its %d completions that the checkpoint has",
            *(number + 1, len(rows), len(prompts) * self._factory.group_size),
        )
        return rows

    def _digest(self, prompts: Sequence[Prompt]) -> str:
        """Return a hash of prompts and settings; saved rows are used only if theirs is the same."""
        factory = self._factory
        bounds = (self._max_head_offpolicyness, self._optimizer_steps)
        made_of = repr((list(prompts), factory.group_size, factory.sampling, bounds))
        return hashlib.sha256(made_of.encode()).hexdigest()


class StaleGroupsWarning:
    """Warn at the first step whose groups were dropped as too old; later ones have the metric."""

    def __init__(self) -> None:
        self._has_warned = False

    def warn_once(self, fraction: float, step: int) -> None:
        """Log a warning if this is the first step, numbered from 1, with such groups."""
        if fraction and not self._has_warned:
            self._has_warned = True
            rank_zero_only(log.warning)(
                "rollout step %d: %s This warning comes once; the metric rollout/stale_fraction "
                "covers every step.",
                *(step, describe_stale(fraction)),
            )


def drop_stale_groups(
    rollouts: RolloutBatch, version: int, max_head_offpolicyness: int, metrics: Metrics
) -> RolloutBatch:
    """Exclude groups that contain a token sampled with weights that are too old.

    Args:
        version: Version of the policy that is about to be updated.
    """
    ages = [version - min(c.policy_versions) for c in rollouts.sampled if c.policy_versions]
    metrics.add_all("rollout/head_offpolicyness_mean", [float(age) for age in ages])
    if ages:
        metrics.maximum("rollout/head_offpolicyness_max", max(ages))
    oldest = version - max_head_offpolicyness
    stale = [
        any(min(one.policy_versions, default=oldest) < oldest for one in group.completions)
        for group in rollouts.groups
    ]
    metrics.add_all("rollout/stale_fraction", [float(is_stale) for is_stale in stale])
    return rollouts.without_stale(stale) if any(stale) else rollouts
