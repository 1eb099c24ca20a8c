"""Rollout steps on their way from prompts to scores, some of them ahead of the policy's updates.

Samples and hands on; waits for no score and changes no parameter.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lit_grpo.rewards.scoring import Scoring
from lit_grpo.rollout import EngineFailed
from lit_grpo.training.metrics import Metrics
from lit_grpo.training.seeds import SeedPurpose
from lit_grpo.types import Prompt, RolloutBatch

if TYPE_CHECKING:
    from lit_grpo.training.grpo import GRPOModule


class Flight:
    """The completions of some prompts, each handed to the rewards as it finishes.

    Args:
        seed: Of the completions.
    """

    def __init__(self, module: GRPOModule, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts = list(prompts)
        self.scoring: Scoring | None = None
        """None without prompts."""
        self.failure = ""
        """Why the engine gave up."""
        self._module = module
        self._seed = seed
        self._thread: threading.Thread | None = None
        self._is_cancelled = False
        self._error: BaseException | None = None
        if prompts:
            self.scoring = module.rewards.open(prompts, module.group_size)

    def take_off(self) -> None:
        """Sample in a thread, while the caller does something else."""
        self._thread = threading.Thread(target=self._sample_aside, name="flight", daemon=True)
        self._thread.start()

    def land(self, seconds: float) -> bool:
        """Whether every completion is with the rewards, or the engine has given up.

        Args:
            seconds: To wait for an engine that can sample in a thread; others take their time.
        """
        if self._thread is None and self._module.engine.overlaps_updates:
            self.take_off()
        if self._thread is None:
            self._sample()
        else:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
        if self._error is not None:
            raise self._error
        return True

    def cancel(self) -> None:
        """Forget what is not scored yet; the engine hears of it with its next completion."""
        self._is_cancelled = True
        if self.scoring is not None:
            self.scoring.cancel()

    def _sample_aside(self) -> None:
        try:
            self._sample()
        except BaseException as error:  # for whoever waits for it
            self._error = error

    def _sample(self) -> None:
        if self.scoring is None:
            return
        module = self._module
        completions = module.engine.generate(
            self.prompts, module.group_size, module.sampling, seed=self._seed
        )
        try:
            for row, completion in completions:
                if self._is_cancelled:
                    return
                self.scoring.add(row, completion)
        except EngineFailed as error:
            self.failure = str(error)


class Flights:
    """The rollout steps under way: the present one, and those that may be ahead of it.

    Source: bounded staleness, AReaL, arXiv 2505.24298 section 4.

    Args:
        max_head_offpolicyness: Optimizer steps that the policy may be ahead of the weights that
            wrote a completion's first token, when it is trained on.
    """

    def __init__(self, module: GRPOModule, max_head_offpolicyness: int) -> None:
        self.max_head_offpolicyness = max_head_offpolicyness
        self._module = module
        self._ahead: deque[Flight] = deque()

    @property
    def num_ahead(self) -> int:
        """Rollout steps that may be under way beside the one that is waited for."""
        return self.max_head_offpolicyness // self._module.update.optimizer_steps

    def present(self, prompts: Sequence[Prompt]) -> Flight:
        """The flight of this rollout step; further ones take off behind it."""
        step = self._module.rollout_step
        while self._ahead and self._ahead[0].prompts != list(prompts):
            self._ahead.popleft().cancel()  # the data has gone another way
        if not self.num_ahead:
            return self._new(prompts, step)
        if not self._ahead:
            self._take_off(prompts, step)
        for number in range(len(self._ahead), 1 + self.num_ahead):
            if not self._is_beyond_the_end(number):
                self._take_off(self._loader.peek(number), step + number)
        return self._ahead.popleft()

    def cancel(self) -> None:
        while self._ahead:
            self._ahead.popleft().cancel()

    @property
    def _loader(self) -> Any:
        return self._module.trainer.train_dataloader

    def _is_beyond_the_end(self, number: int) -> bool:
        """Whether the run ends before so many further rollout steps."""
        module, last = self._module, self._module.trainer.max_steps
        return last > 0 and module.global_step + number * module.update.optimizer_steps >= last

    def _new(self, prompts: Sequence[Prompt], step: int) -> Flight:
        seed = self._module.derive_seed(SeedPurpose.ROLLOUT, step)
        return Flight(self._module, prompts, seed)

    def _take_off(self, prompts: Sequence[Prompt], step: int) -> None:
        flight = self._new(prompts, step)
        flight.take_off()
        self._ahead.append(flight)


def without_stale_groups(
    rollouts: RolloutBatch, version: int, max_head_offpolicyness: int, metrics: Metrics
) -> RolloutBatch:
    """Groups with a token of weights that are too old are not trained on.

    Args:
        version: Of the policy that is about to be updated.
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
    if not any(stale):
        return rollouts
    valid, rewards = rollouts.valid.clone(), rollouts.rewards.clone()
    valid[stale], rewards[stale] = False, float("nan")
    return replace(rollouts, valid=valid, rewards=rewards)
