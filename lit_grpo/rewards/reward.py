"""The contract of a reward: one class, one method to override.

A reward says what a completion is worth and raises plain errors. It never retries, times itself
out, or turns a failure into a number: the boundary of the suite does that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Sequence
from typing import Any, Literal, get_args

from lit_grpo.types import Completion, Measurements, Prompt, Score, UserError

OnError = Literal["retry", "mask", "drop_group", "raise"]
Value = float | Score | None
"""What a reward returns for one completion; None is "could not be scored"."""


class Reward:
    """Scores completions. A subclass overrides ``score`` or, to compare siblings, ``score_group``.

    Either may be ``async def``. Async rewards share one event loop, so they must not block it;
    a sync reward has a thread of its own, so it need not be thread-safe. Any of ``start``,
    ``check`` and ``close`` may be ``async def`` too and then runs on that event loop.

    Args:
        name: unique in a suite; metrics carry it. The class name in snake case without its
            suffix ``Reward`` when not given.
        weight: factor in the sum; 0 only monitors, and then only ``raise`` can have an effect.
        on_error: what becomes of a row that this reward failed to score. ``mask`` leaves the row
            out, ``drop_group`` its whole group, ``raise`` stops the run, ``retry`` asks again
            with exponential backoff and then masks.
        timeout_seconds: for one call of ``score`` or ``score_group``; None waits for ever.
        num_retries: further calls that ``retry`` makes.
    """

    name: str = "reward"
    weight: float = 1.0
    on_error: OnError = "mask"
    timeout_seconds: float | None = None
    num_retries: int = 2

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
    ) -> None:
        if name is not None:
            self.name = name
        self.weight = weight
        self.on_error = on_error
        self.timeout_seconds = timeout_seconds
        self.num_retries = num_retries

    def score(self, prompt: Prompt, completion: Completion) -> Value | Awaitable[Value]:
        """What the completion is worth, or None when that cannot be said."""
        raise NotImplementedError

    def score_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Sequence[Value] | Awaitable[Sequence[Value]]:
        """One value for each of the G completions of a prompt, in their order."""
        raise NotImplementedError

    def start(self) -> object:
        """Acquires what scoring needs; called once before the first score."""

    def check(self, prompts: Sequence[Prompt]) -> object:
        """Looks at the data before training.

        Raises:
            ValueError: prompts that this reward can never score, with their number and the fix.
        """

    def close(self) -> object:
        """Releases what ``start`` acquired; scores that are still pending are lost."""

    def observe(self) -> Measurements:
        """What was measured since the last call, for the metrics of a rollout step."""
        return Measurements()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know, such as money spent; every rank calls this."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state back."""

    @property
    def is_grouped(self) -> bool:
        """Whether siblings are scored together; ``score_group`` wins over ``score``."""
        return type(self).score_group is not Reward.score_group

    @property
    def siblings_per_call(self) -> int | None:
        """How many completions of one prompt ``score_group`` is given at a time, at most.

        None means all G, when the last of them has been generated. A number lets scoring begin as
        soon as so many are there.
        """
        return None

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.score_group if self.is_grouped else self.score)


def _snake_case(class_name: str) -> str:
    stem = class_name.removesuffix("Reward") or class_name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", stem).lower()


def check_settings(reward: Reward) -> None:
    """Refuses settings that no reward can work with, also of one that skipped ``__init__``."""
    kind = type(reward)
    if not reward.is_grouped and kind.score is Reward.score:
        raise UserError(
            f"a reward must override score or score_group, {kind.__name__} has neither "
            "(there is nothing to call). Define score(self, prompt, completion)."
        )
    rules = {
        "name": (re.fullmatch(r"[\w.-]+", str(reward.name)), "letters, digits, '_', '-' and '.'"),
        "weight": (abs(reward.weight) < float("inf"), "a finite number"),
        "on_error": (
            reward.on_error in get_args(OnError),
            "one of " + ", ".join(get_args(OnError)),
        ),
        "timeout_seconds": (
            reward.timeout_seconds is None or reward.timeout_seconds > 0,
            "positive, or null for no limit",
        ),
        "num_retries": (reward.num_retries >= 0, ">= 0"),
    }
    for setting, (holds, rule) in rules.items():
        if not holds:
            raise UserError(
                f"{setting} of reward {kind.__name__} must be {rule}, "
                f"got {getattr(reward, setting)!r}. Set {setting} in its init_args."
            )
