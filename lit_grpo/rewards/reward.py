"""The base class of rewards, with one method to override.

A reward returns values and raises plain exceptions. Timeouts, retries and the handling of failures
are left to ``lit_grpo.rewards.scoring``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from lit_grpo.types import (
    Completion,
    Measurements,
    Prompt,
    Score,
)
from lit_grpo.types.keywords import checks_keywords

T = TypeVar("T")

OnError = Literal["retry", "mask", "drop_group", "raise"]
ReasoningView = Literal["strip", "keep"]
Value = float | Score | None
"""A reward's result for one completion; None if it could not be scored."""


@checks_keywords
class Reward:
    """Score completions. Override ``score`` or, to compare siblings, ``score_group``.

    Either may be ``async def``. Async rewards share one event loop, which they must not block. A
    sync reward has its own thread, so it need not be thread-safe. ``start``, ``check`` and
    ``close`` may be ``async def`` too; they then run on that event loop.

    Args:
        name: Name in the metrics, unique among the rewards of a run. By default the class name in
            snake case without the suffix ``Reward``.
        weight: Factor in the sum of rewards. With 0 the reward is only monitored, and ``on_error``
            has no effect unless it is ``raise``.
        on_error: What to do with a row that the reward failed to score: ``mask`` excludes the
            row, ``drop_group`` excludes its whole group, ``raise`` stops the run, ``retry``
            retries with exponential backoff and then masks.
        timeout_seconds: Timeout of one call of ``score`` or ``score_group``; null for none.
        num_retries: Maximum number of retries with ``on_error: retry``.
        reasoning: ``strip`` to see only the answer of a completion, its text and its tokens after
            the policy's reasoning; ``keep`` to see all of it. Default: the class's own setting,
            which is ``keep`` unless overridden.
        only_sources: Sources of the mixture whose completions it scores; null for all. The reward
            does not apply to the others: it is not called, and is left out of the sum.
    """

    name: str = "reward"
    weight: float = 1.0
    on_error: OnError = "mask"
    timeout_seconds: float | None = None
    num_retries: int = 2
    reasoning: ReasoningView = "keep"
    outlasts_steps: ClassVar[bool] = False
    """Whether a stop within a step saves what that step has changed, such as money spent; otherwise
    the state before the step is saved."""
    only_sources: Sequence[str] | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = _snake_case(cls.__name__)

    def __init__(
        self,
        *,
        name: str | None = None,
        weight: float = 1.0,
        on_error: OnError = "mask",
        timeout_seconds: float | None = None,
        num_retries: int = 2,
        reasoning: ReasoningView | None = None,
        only_sources: list[str] | None = None,
    ) -> None:
        if name is not None:
            self.name = name
        if reasoning is not None:
            self.reasoning = reasoning
        if only_sources is not None:
            self.only_sources = only_sources
        self.weight = weight
        self.on_error = on_error
        self.timeout_seconds = timeout_seconds
        self.num_retries = num_retries

    def score(self, prompt: Prompt, completion: Completion) -> Value | Awaitable[Value]:
        """Return the value of the completion, or None if it cannot be scored."""
        raise NotImplementedError

    def score_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Sequence[Value] | Awaitable[Sequence[Value]]:
        """Return one value for each of the G completions of a prompt, in order."""
        raise NotImplementedError

    def start(self) -> object:
        """Acquire what scoring needs; called once before the first score.

        It may be ``async def``: it then runs on the event loop of async scoring.
        """

    def check(self, prompts: Sequence[Prompt]) -> object:
        """Check the data before training.

        Raises:
            UserError: this reward can never score some of the prompts. The message says how many
                there are and how to fix them.
        """

    def close(self) -> object:
        """Release what ``start`` acquired; pending scores are lost.

        It may be ``async def``: it then runs on the event loop of async scoring.
        """

    def observe(self) -> Measurements:
        """Return what was measured since the last call, for the metrics of a rollout step."""
        return Measurements()

    def record_spending(self, run_dir: Path) -> None:
        """Record spending from now on in the run's directory, where it survives a kill.

        It is called before the first step, after ``load_state_dict``; every rank calls it.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, such as a moving average; every rank calls this.

        It is called before each rollout step, and for checkpoints.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""

    def applies_to(self, prompt: Prompt) -> bool:
        """Return whether the reward is for the source of a prompt."""
        return self.only_sources is None or prompt.source in self.only_sources

    def applicable_prompts(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts of the sources that the reward is for."""
        return [prompt for prompt in prompts if self.applies_to(prompt)]

    @property
    def is_grouped(self) -> bool:
        """Whether siblings are scored together; ``score_group`` takes precedence over ``score``."""
        return type(self).score_group is not Reward.score_group

    @property
    def scorer(self) -> Callable[..., object]:
        """The user's code that scores; a message about what it returned names it."""
        return type(self).score_group if self.is_grouped else type(self).score

    @property
    def siblings_per_call(self) -> int | None:
        """Maximum number of completions per call of ``score_group``.

        None means all G of a prompt, so scoring starts when the last one has been generated.
        With a number it starts as soon as that many exist.
        """
        return None

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.score_group if self.is_grouped else self.score)


def _snake_case(class_name: str) -> str:
    stem = class_name.removesuffix("Reward") or class_name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", stem).lower()


def setting_key(reward: Reward, name: str) -> str:
    """Return the key of a reward's setting for error messages: ``MathReward.init_args.weight``."""
    return f"{type(reward).__name__}.init_args.{name}"


def started(made: T | None, reward: Reward) -> T:
    """Return what the ``start()`` of a reward has made, once it was called.

    Raises:
        RuntimeError: the reward was not started.
    """
    if made is None:
        raise RuntimeError(
            f"{reward.name} is not started: call its start() first, in the event loop of score(), "
            "and its close() in the end"
        )
    return made
