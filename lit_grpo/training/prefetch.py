"""Start rollouts, also those of later steps during the update; pass completions to the rewards.

`score_gate` waits for the scores.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.concurrency import run_in_daemon_thread
from lit_grpo.data import TrainingLoader
from lit_grpo.rewards.scoring import RewardSuite, Scoring
from lit_grpo.rollout import EngineFailed, RolloutEngine, Sampling
from lit_grpo.training.metrics import Metrics
from lit_grpo.training.saved_rollouts import from_text, to_text
from lit_grpo.training.seeds import SeedPurpose, Seeds
from lit_grpo.types import Completion, Prompt, RolloutBatch, ScoredCompletion, StageProgress

log = logging.getLogger(__name__)

NO_ROWS: Mapping[int, ScoredCompletion] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """Number, policy version, seeds and data loader of the current rollout step."""

    number: int
    """Number of rollout steps before this one."""
    policy_version: int
    """Number of optimizer steps before this one."""
    max_policy_version: int | None
    """Number of optimizer steps of the whole run; None if there is no such limit."""
    seeds: Seeds
    loader: TrainingLoader
    """Supplies the prompts of later steps, and those of replacement groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFactory:
    """Create rollouts with one engine, its sampling settings and the rewards."""

    engine: RolloutEngine
    rewards: RewardSuite
    sampling: Sampling
    group_size: int

    def create(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        finished: Mapping[int, ScoredCompletion] = NO_ROWS,
    ) -> PendingRollout:
        """Return a rollout of G completions per prompt, of which the finished rows are not sampled.

        It is not yet started, but what the finished rows lack of scores is asked for.
        """
        scoring = self.rewards.open(prompts, self.group_size) if prompts else None
        if scoring is not None:
            for row, one in finished.items():
                scoring.add(row, one.completion, one.scores)
        return PendingRollout(
            list(prompts),
            scoring,
            lambda: self._sample(prompts, seed, finished),
            samples_in_thread=self.engine.overlaps_updates,
        )

    def _sample(
        self, prompts: Sequence[Prompt], seed: int, finished: Mapping[int, ScoredCompletion]
    ) -> Iterator[tuple[int, Completion]]:
        size = self.group_size
        if not finished:
            return self.engine.generate(prompts, size, self.sampling, seed=seed)
        rows = [row for row in range(len(prompts) * size) if row not in finished]
        alone = [prompts[row // size] for row in rows]  # each row as a group of one
        sampled = self.engine.generate(alone, 1, self.sampling, seed=seed) if rows else iter(())
        return ((rows[index], completion) for index, completion in sampled)


def score_while_sampling(scoring: Scoring, completions: Iterable[tuple[int, Completion]]) -> None:
    """Pass each completion to the rewards as soon as it is finished."""
    for row, completion in completions:
        scoring.add(row, completion)


def with_unfinished_tokens(finished: StageProgress, engine: RolloutEngine) -> StageProgress:
    """Add the tokens of completions that the engine is still sampling."""
    return replace(finished, num_tokens=finished.num_tokens + engine.num_unfinished_tokens)


class PendingRollout:
    """A rollout that may still be sampled; completions go to the rewards as they finish.

    Args:
        scoring: Takes the completions; None without prompts.
        sample: Starts the engine's generation.
        samples_in_thread: Whether the engine can sample while the main thread does other work.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        scoring: Scoring | None,
        sample: Callable[[], Iterator[tuple[int, Completion]]],
        *,
        samples_in_thread: bool,
    ) -> None:
        self.prompts = prompts
        self.scoring = scoring
        self.engine_failure = ""
        """Why the engine gave up; empty while it has not."""
        self._sample = sample
        self._samples_in_thread = samples_in_thread
        self._sampling: Future[None] | None = None
        self._is_cancelled = False
        self._is_sampled = False
        """Whether an engine that samples in the caller's thread is done."""

    def start(self) -> None:
        """Start sampling in a thread."""
        self._sampling = run_in_daemon_thread(self._sample_and_score, "rollout")

    def wait(self, seconds: float) -> bool:
        """Wait until the rewards have every completion or the engine has given up.

        Return False on timeout. Start sampling if it has not been started.

        Args:
            seconds: Maximum wait for an engine that samples in a thread. Any other engine samples
                in this call, however long that takes, and takes its part in the rounds of the
                ranks' wait by ``on_wait``.
        """
        if self._sampling is None and self._samples_in_thread:
            self.start()
        if self._sampling is None:
            if not self._is_sampled:  # another rank may have made this one wait again
                self._sample_and_score()
                self._is_sampled = True
            return True
        wait_for_futures([self._sampling], seconds)
        if not self._sampling.done():
            return False
        self._sampling.result()  # raises what the thread raised
        return True

    def finished(self) -> dict[int, ScoredCompletion]:
        """Return by row the completions so far, with their scores."""
        return {} if self.scoring is None else self.scoring.finished()

    def cancel(self) -> None:
        """Cancel missing scores; sampling stops at the next completion."""
        self._is_cancelled = True
        if self.scoring is not None:
            self.scoring.cancel()

    def _sample_and_score(self) -> None:
        if self.scoring is None:
            return
        try:
            score_while_sampling(self.scoring, self._until_cancelled())
        except EngineFailed as error:
            self.engine_failure = str(error)

    def _until_cancelled(self) -> Iterator[tuple[int, Completion]]:
        for row, completion in self._sample():
            if self._is_cancelled:
                return
            yield row, completion


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
        """Return this step's rollout, and start those of the next steps that may be sampled now."""
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
        """Cancel the rollouts of this step and later ones, and forget those of a checkpoint."""
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
                "rollout step %d is sampled again: what the checkpoint has of it is of other "
                "prompts or settings",
                number,
            )
            return {}
        rows = from_text(saved["rows"])
        rank_zero_only(log.info)(
            "rollout step %d goes on with the %d of its %d completions that the checkpoint has",
            *(number, len(rows), len(prompts) * self._factory.group_size),
        )
        return rows

    def _digest(self, prompts: Sequence[Prompt]) -> str:
        """Return what is the same only for rollouts of the same prompts and settings."""
        factory = self._factory
        bounds = (self._max_head_offpolicyness, self._optimizer_steps)
        made_of = repr((list(prompts), factory.group_size, factory.sampling, bounds))
        return hashlib.sha256(made_of.encode()).hexdigest()


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
    return rollouts.without_groups(stale) if any(stale) else rollouts
