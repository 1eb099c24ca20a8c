"""The base class of rewards, with one method to override.

A reward returns values and raises plain exceptions. Timeouts, retries and the handling of failures
are left to ``lit_grpo.rewards.scoring``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

from lit_grpo.types import (
    Completion,
    Measurements,
    Prompt,
    Score,
    UserError,
    check_range,
    setting_error,
)
from lit_grpo.types.functions import unfit_signature, unused_arguments
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.overrides import check_made

_ARGUMENTS = {
    "score": ("prompt", "completion"),
    "score_group": ("prompt", "completions"),
    "start": (),
    "check": ("prompts",),
    "close": (),
}
"""Method that a subclass may define -> what it is called with."""

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


def check_settings(reward: Reward) -> None:
    """Check the settings that all rewards have.

    It is not part of ``__init__``, which a subclass may skip.

    Raises:
        UserError: a setting is out of range or dropped, or no method is overridden.
    """
    kind = type(reward)
    if not reward.is_grouped and kind.score is Reward.score:
        raise UserError(
            f"a reward must override score or score_group; {kind.__name__} has neither "
            "(there is nothing to call). Define score(self, prompt, completion)."
        )
    _check_signatures(reward)
    _refuse_half_a_state(kind)
    check_made(reward)
    _refuse_dropped_settings(kind)
    if not re.fullmatch(r"[\w.-]+", str(reward.name)):
        rule = "one or more letters, digits, '_', '-' and '.'"
        raise setting_error(
            setting_key(reward, "name"), rule, repr(reward.name), "it names metrics"
        )
    _refuse_class_attributes(reward)
    is_number = isinstance(reward.weight, Real) and not isinstance(reward.weight, bool)
    if not is_number or not abs(reward.weight) < float("inf"):
        raise setting_error(setting_key(reward, "weight"), "a finite number", repr(reward.weight))
    for setting, choices in (("on_error", OnError), ("reasoning", ReasoningView)):
        if (value := getattr(reward, setting)) not in get_args(choices):
            rule = "one of " + ", ".join(get_args(choices))
            raise setting_error(setting_key(reward, setting), rule, repr(value))
    only = reward.only_sources
    if only is not None and (isinstance(only, str) or not only):
        rule, why = "a list of sources, or null for all", "an empty one would score nothing"
        raise setting_error(setting_key(reward, "only_sources"), rule, repr(only), why)
    check_range(setting_key(reward, "timeout_seconds"), reward.timeout_seconds, above=0)
    check_range(setting_key(reward, "num_retries"), reward.num_retries, at_least=0)


def _refuse_half_a_state(kind: type[Reward]) -> None:
    """Check that a state that is saved is also restored.

    Raises:
        UserError: only one of the two methods is overridden.
    """
    names = ("state_dict", "load_state_dict")
    own = [name for name in names if getattr(kind, name) is not getattr(Reward, name)]
    if len(own) == 1:
        (missing,) = set(names).difference(own)
        raise UserError(
            f"a reward must override state_dict and load_state_dict together; {kind.__name__} has "
            f"no {missing} (a resumed run would go on without its state). Define it."
        )


def _refuse_dropped_settings(kind: type[Reward]) -> None:
    """Refuse a constructor of the user's that takes a setting of all rewards and never uses it.

    Raises:
        UserError: the class or one of its bases has one.
    """
    settings = inspect.signature(Reward).parameters
    classes = kind.__mro__[: kind.__mro__.index(Reward)]
    for one in (one for one in classes if "__init__" in vars(one)):
        unused = unused_arguments(vars(one)["__init__"])
        for name in (name for name in settings if name in unused):
            raise UserError(
                f"{one.__name__}.__init__ must pass {name} on, which it takes and does not use "
                f"(setting it would have no effect). Write super().__init__({name}={name}, "
                "...), or leave it to **settings: def __init__(self, ..., **settings): "
                "super().__init__(**settings)."
            )


def _refuse_class_attributes(reward: Reward) -> None:
    """Refuse settings that a class of the user's has and `Reward.__init__` has replaced.

    Raises:
        UserError: the class has one.
    """
    kind = type(reward)
    for setting in ("weight", "on_error", "timeout_seconds", "num_retries"):
        given, value = getattr(kind, setting), getattr(reward, setting)
        if given not in (value, getattr(Reward, setting)):
            raise UserError(
                f"{setting} must not be an attribute of a class, got {kind.__name__}.{setting} = "
                f"{given!r} (it has no effect: the reward has {value!r}). Set "
                f"{setting_key(reward, setting)} in the config, or call "
                f"super().__init__({setting}={given!r}) in {kind.__name__}.__init__."
            )


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


def _check_signatures(reward: Reward) -> None:
    """Check that the methods of a reward take what they are called with."""
    unused = "score" if reward.is_grouped else "score_group"
    for name, arguments in _ARGUMENTS.items():
        method = getattr(reward, name)
        if name == unused or unfit_signature(method, arguments) is None:
            continue
        whole = ", ".join(["self", *arguments])
        keyword = "async def" if inspect.iscoroutinefunction(method) else "def"
        raise UserError(
            f"{type(reward).__name__}.{name} must take {whole}, got "
            f"{name}{inspect.signature(getattr(type(reward), name))} (it is called with "
            f"{' and '.join(arguments) or 'nothing'}, by position). Define {keyword} "
            f"{name}({whole})."
        )
