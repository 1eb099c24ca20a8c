"""The run to check: the objects that the command line built from a config, and what they read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Generic, TypeVar

from lit_grpo.cli.command_line import CommandLine
from lit_grpo.cli.rewards.commands import read_prompts
from lit_grpo.data import TrainingLoader
from lit_grpo.policy.files.loading import max_positions
from lit_grpo.rewards import JudgedReward, ProcessReward, Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.runs.checkpoints.callback import Checkpoints
from lit_grpo.training import GRPOModule
from lit_grpo.training.base import PolicyModule
from lit_grpo.types import Prompt, UserError

T = TypeVar("T")
ASSUMED_PROMPT_TOKENS = 512
"""Assumed length of the longest prompt if neither the data nor a setting gives it."""


class NotChecked(Exception):
    """A check is not made: offline, or without what another check reports as missing."""


class ReadOnce(Generic[T]):
    """The result of a function that is called only once.

    Args:
        name: What it returns, for the message of the checks that need it.
    """

    def __init__(self, name: str, function: Callable[[], T]) -> None:
        self._name = name
        self._function = function
        self._results: list[T] = []
        self._error: Exception | None = None

    def read(self) -> T:
        """Return the result, or raise what the function raised."""
        if self._error is None and not self._results:
            try:
                self._results.append(self._function())
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._results[0]

    def get(self) -> T:
        """Return the result, for a check that only needs it.

        Raises:
            NotChecked: it could not be read, which the check that reads it reports.
        """
        try:
            return self.read()
        except Exception as error:
            raise NotChecked(f"Not checked, since {self._name} could not be read.") from error

    def or_none(self) -> T | None:
        """Return the result, or None if it could not be read."""
        try:
            return self.read()
        except Exception:
            return None


class BuiltRun:
    """A run that has not started yet."""

    def __init__(self, cli: CommandLine) -> None:
        if not isinstance(cli.model, PolicyModule):
            raise UserError(
                f"doctor needs a model that trains a policy, got {type(cli.model).__name__}. Set "
                "model to the keys of GRPOModule or SFTModule."
            )
        self.cli = cli
        self.module: PolicyModule = cli.model
        self.trainer: Any = cli.trainer
        self.module.trainer = self.trainer
        self.is_offline: bool = cli.config.offline
        self.tokenizer = ReadOnce("the tokenizer", lambda: self.module.tokenizer)
        self.outline = ReadOnce("the model", self.module.policy.outline)
        self.loader = ReadOnce("the data", self._read_data)
        self._starts: dict[Reward, ReadOnce[bool]] = {}

    def _read_data(self) -> TrainingLoader:
        self.tokenizer.get()
        return read_prompts(self.cli)

    @property
    def probe_advice(self) -> str:
        """How to see what rewards do with completions; empty where the probe is asked for."""
        return "" if self.cli.config.probe else " --probe lets rewards score some completions."

    @property
    def grpo(self) -> GRPOModule | None:
        """The module, or None in a warm-up."""
        return self.module if isinstance(self.module, GRPOModule) else None

    @property
    def prompts(self) -> list[Prompt]:
        """The training prompts, or some of very many; none if they cannot be read."""
        loader = self.loader.or_none()
        return list(loader.some_prompts()) if loader else []

    @property
    def val_prompts(self) -> list[Prompt]:
        """The held-out prompts; none if they are not used."""
        if self.loader.or_none() is None or not self.trainer.enable_validation:
            return []
        loader = self.cli.datamodule.val_dataloader()
        return list(loader.some_prompts()) if loader else []

    @cached_property
    def positions(self) -> int | None:
        """Most tokens that the model reads; None if there is no limit or no model."""
        outline: Any = self.outline.or_none()
        return None if outline is None else max_positions(outline.config)

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """Tokens of the training prompts, the longest first; an assumed one without data."""
        if prompts := self.prompts:
            return sorted((len(prompt.token_ids) for prompt in prompts), reverse=True)
        limit = self.cli.datamodule.prompt_format.max_prompt_tokens
        room = (self.positions or 0) - self.module.sampling.max_tokens
        return [limit or (min(room, ASSUMED_PROMPT_TOKENS) if room > 0 else ASSUMED_PROMPT_TOKENS)]

    @cached_property
    def completion_tokens(self) -> int:
        """Tokens of the longest completion; in a warm-up, of the longest target.

        Raises:
            UserError: a row has no target.
        """
        if isinstance(self.module, GRPOModule):
            return self.module.sampling.max_tokens
        targets: Any = self.module
        lengths = [len(targets.target_ids(prompt)) for prompt in self.prompts]
        return max(lengths, default=self.module.sampling.max_tokens)

    @property
    def rewards(self) -> list[Reward]:
        """All rewards, including the one that measures held-out accuracy."""
        trained = self.grpo.rewards.rewards if self.grpo else ()
        return [*trained, *self.module.evaluation.suite.rewards]

    @property
    def judged(self) -> list[JudgedReward]:
        """The rewards that ask a judge."""
        return [one for one in self.rewards if isinstance(one, JudgedReward)]

    @property
    def started(self) -> list[Reward]:
        """The rewards whose start is tried: in worker processes, and by the user's own code."""
        return [one for one in self.rewards if isinstance(one, ProcessReward) or _has_start(one)]

    def may_start(self, reward: Reward) -> bool:
        """Return whether a check may start a reward; offline only a built-in one."""
        return not self.is_offline or is_ours(own_reward(reward))

    def start_of(self, reward: Reward) -> ReadOnce[bool]:
        """Return whether a reward starts, which is tried once."""
        start = ReadOnce(reward.name, lambda: self._try_start(reward))
        return self._starts.setdefault(reward, start)

    def _try_start(self, reward: Reward) -> bool:
        with self.running(suite_of(reward)):
            return True

    @contextmanager
    def running(self, suite: RewardSuite) -> Iterator[None]:
        """Start rewards, and close them at the end."""
        try:
            suite.start(self.module.reasoning)
            yield
        finally:
            suite.close()

    @property
    def checkpoints(self) -> Checkpoints | None:
        """The callback that writes checkpoints; None if they are turned off."""
        found = (one for one in self.trainer.callbacks if isinstance(one, Checkpoints))
        return next(found, None)


def suite_of(reward: Reward) -> RewardSuite:
    """Return a suite of one reward, whatever its weight."""
    alone = copy.copy(reward)
    alone.weight = 1.0
    return RewardSuite([alone])


def own_reward(reward: Reward) -> Reward:
    """Return the reward inside a ``ProcessReward``, or the reward itself."""
    return reward.reward if isinstance(reward, ProcessReward) else reward


def _has_start(reward: Reward) -> bool:
    """Return whether a reward starts by code of the user's; a judge's is asked by another check."""
    has_own = type(reward).start is not Reward.start and not is_ours(reward)
    return has_own and not isinstance(reward, JudgedReward)


def is_ours(reward: Reward) -> bool:
    """Return whether a reward is one of lit_grpo."""
    return type(reward).__module__.startswith("lit_grpo.")
