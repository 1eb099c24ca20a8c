"""Use a reward function written for TRL or verl as a reward, without changes to it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lit_grpo.rewards.functions.call_conventions import (
    TRL,
    TRL_TRAINER_ARGUMENTS,
    VERL,
    CallConvention,
    about_completions,
    completion_arguments,
)
from lit_grpo.rewards.functions.path import load_function
from lit_grpo.rewards.reward import Reward, Value
from lit_grpo.types import Completion, Outcome, Prompt, Score, UserError
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.rollouts import own_copy
from lit_grpo.types.spelling import did_you_mean

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@checks_types
class FunctionReward(Reward):
    """Call a reward function with TRL's signature or, if it takes ``solution_str``, with verl's.

    TRL: ``f(prompts, completions, **columns) -> list[float | None]``, called once per group.
    ``prompts`` and ``completions`` are texts, or lists of messages if the prompt is a conversation.
    Every column of the row, ``answer`` and ``completion_ids`` are passed by name as lists of G
    values. TRL's ``trainer_state``, ``log_extra`` and ``log_metric`` are not passed.

    verl: ``f(data_source, solution_str, ground_truth, extra_info) -> float | dict``, called once
    per completion. ``ground_truth`` comes from the column ``reward_model``, else it is the gold
    answer. ``data_source`` and ``extra_info`` are columns; without the latter, ``extra_info`` is
    empty. If the function returns a dict, its ``score`` is the value.

    The function sees whole completions, with their reasoning, unless ``reasoning`` is ``strip``.
    Either may be ``async def``. A function without ``**kwargs`` gets only the arguments it names.

    Args:
        function: ``module:function``, ``module.function``, ``path/to/file.py:function``, or a
            callable.
        reward_kwargs: Further keyword arguments. Each must be a named parameter of the function, so
            that a misspelled one does not disappear in its ``**kwargs``.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        reward_kwargs: dict[str, Any] | None = None,
        *,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        self._source = function
        self.function = _resolve(function)
        _refuse_reward(self.function, function)
        self.reward_kwargs = dict(reward_kwargs or {})
        super().__init__(name=name or _default_name(self.function), **settings)
        parameters = inspect.signature(self.function).parameters.values()
        self._named = [one.name for one in parameters if one.kind in NAMED]
        self._required = {
            one.name for one in parameters if one.kind in NAMED and one.default is one.empty
        }
        self._takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
        self._check_takes_completions()
        self._check_reward_kwargs()

    @property
    def is_grouped(self) -> bool:
        return self._form is TRL

    @property
    def scorer(self) -> Callable[..., object]:
        return self.function

    @property
    def is_async(self) -> bool:
        function = self.function
        call = getattr(function, "__call__", None)  # noqa: B004 - an object with async __call__
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    def score(self, prompt: Prompt, completion: Completion) -> Value | Awaitable[Value]:
        result = self._call(self._row(prompt) | {"solution_str": completion.text})
        return _value_of(result) if inspect.isawaitable(result) else _value(result)

    def score_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Sequence[Value] | Awaitable[Sequence[Value]]:
        rows = [self._row(prompt) for _ in completions]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        try:
            result = self._call(columns | completion_arguments(prompt, completions))
        except (TypeError, AttributeError) as error:
            if about := about_completions(prompt, str(error)):
                error.add_note(about)
            raise
        return cast(Sequence[Value] | Awaitable[Sequence[Value]], result)

    @property
    def columns(self) -> list[str]:
        """The columns that the data must have, which ``check`` looks for."""
        return sorted(self._required - {*self._form.reserved, *self.reward_kwargs})

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check that the data has every column that the function requires."""
        for prompt in prompts:
            there = self._form.names(prompt)
            missing = [name for name in self.columns if name not in there]
            if names := " and ".join(sorted(TRL_TRAINER_ARGUMENTS.intersection(missing))):
                raise UserError(
                    f"{self.name} must not require {names} (only TRL's trainer passes that). "
                    "Give the parameter a default, such as None."
                )
            if missing:
                columns = [*prompt.columns, *(["answer"] if prompt.answer is not None else [])]
                raise UserError(
                    f"every column that {self.name} requires must be in the data; "
                    f"{', '.join(missing)} is missing from prompt {prompt.id}, which has "
                    f"{', '.join(sorted(set(columns))) or 'none'}. Rename the column in the data "
                    "or the parameter of the function, give the parameter a default, or set one "
                    f"value for all rows: {self._with_value_of(missing[0])}."
                )

    def _with_value_of(self, name: str) -> str:
        """Return the setting that gives a parameter a value."""
        if not isinstance(self._source, str):
            return f"FunctionReward({self.name}, reward_kwargs={{{name!r}: ...}})"
        init_args = f"{{function: {self._source}, reward_kwargs: {{{name}: VALUE}}}}"
        return f"{{class_path: FunctionReward, init_args: {init_args}}}"

    def _check_takes_completions(self) -> None:
        if not self._takes_all and not {*TRL.reserved, *VERL.reserved}.intersection(self._named):
            raise UserError(
                f"a reward function must take completions, got {self.name}"
                f"{inspect.signature(self.function)} (there is nothing that it could score). Name "
                "the parameter solution_str for the text of one completion, or completions for "
                f"the list of those of a prompt: def {self.name}(completions, **columns)."
            )

    def _row(self, prompt: Prompt) -> dict[str, Any]:
        """Return the arguments from the row that the function takes; it may change what it gets."""
        taken = filter(self._takes, self._form.names(prompt))
        return {name: self._form.value(prompt, name) for name in taken}

    def _takes(self, name: str) -> bool:
        return self._takes_all or name in self._named

    @property
    def _form(self) -> CallConvention:
        return VERL if "solution_str" in self._named else TRL

    def _call(self, given: dict[str, Any]) -> Any:
        taken = {name: value for name, value in given.items() if self._takes(name)}
        settings = {name: own_copy(value) for name, value in self.reward_kwargs.items()}
        return self.function(**(taken | settings))

    def _check_reward_kwargs(self) -> None:
        accepted = [name for name in self._named if name not in self._form.reserved]
        for name in self.reward_kwargs:
            if name not in accepted:
                raise UserError(
                    f"reward_kwargs must be named parameters of {self.name}, got {name!r} (the "
                    f"function would not use it). It accepts "
                    f"{', '.join(accepted) or 'none'}.{did_you_mean(name, accepted)}"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the path of a function that came from one, since the function may not pickle."""
        return {name: value for name, value in vars(self).items() if name != "function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.function = _resolve(self._source)


def _resolve(function: str | Callable[..., Any]) -> Callable[..., Any]:
    return load_function(function) if isinstance(function, str) else function


def _refuse_reward(given: Callable[..., Any], source: str | Callable[..., Any]) -> None:
    """Check that a function is not a class of rewards, which is named otherwise.

    Raises:
        UserError: it is one.
    """
    if not (isinstance(given, type) and issubclass(given, Reward)):
        return
    instead = constructor_call(given)
    if isinstance(source, str):
        place = re.split(r"[:.](?=\w+$)", source)[0]
        instead = f"{Path(place).stem if place.endswith('.py') else place}.{given.__name__}"
    raise UserError(
        f"a function must be given, got {given.__name__}, which is a class of rewards. Give "
        f"{instead} as the reward itself."
    )


def _default_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def _value_of(result: Awaitable[Any]) -> Value:
    return _value(await result)


def _value(result: object) -> Value:
    """Return the value from what a verl function returned; the boundary checks its type."""
    if not isinstance(result, Mapping):
        return cast(Value, result)
    if "score" not in result:
        detail = f"a returned dict must have the key 'score', got {', '.join(map(repr, result))}"
        return Score(value=None, outcome=Outcome.ERROR, detail=detail, bug=detail)
    return cast(Value, result["score"])


def as_reward(reward: object, key: str = "each of model.rewards") -> Reward:
    """Return a reward as it is, and a plain function as a ``FunctionReward``.

    Args:
        key: The setting that the reward was given for, for the error.

    Raises:
        UserError: it is a class, cannot be called, or has no name.
    """
    if isinstance(reward, Reward):
        return reward
    rule = f"{key} must be a Reward object or a function"
    if isinstance(reward, type):
        instead = constructor_call(reward) if issubclass(reward, Reward) else "an object of it"
        raise UserError(f"{rule}, got the class {reward.__name__}. Give {instead}.")
    if not callable(reward):
        instead = ""
        if isinstance(reward, str):
            instead = " Give an object of the class, or FunctionReward('my_reward.py:function')."
        elif isinstance(reward, tuple):
            weighted = "MathReward(weight=0.5) or FunctionReward(my_function, weight=0.5)"
            instead = f" A weight is a setting of the reward: {weighted}."
        elif isinstance(reward, list | Real):
            instead = " Give the function itself, without calling it."
        elif hasattr(reward, "score"):
            instead = f" Let {type(reward).__name__} subclass lit_grpo.Reward."
        raise UserError(f"{rule}, got {reward!r}.{instead}")
    if getattr(reward, "__name__", "") == "<lambda>":
        raise UserError(
            f"{key} must have a name, and a lambda has none. Write a def, or give "
            "FunctionReward(function, name='my_reward')."
        )
    return FunctionReward(reward)


def constructor_call(kind: type) -> str:
    """Return how an object of a class is made: ``MathReward()`` or ``FormatReward(...)``."""
    parameters = inspect.signature(kind).parameters.values()
    needs_any = any(one.default is one.empty and one.kind in NAMED for one in parameters)
    return f"{kind.__name__}({'...' if needs_any else ''})"


if TYPE_CHECKING:
    RewardOrFunction = Reward | Callable[..., Any]
    Rewards = Sequence[RewardOrFunction]
else:
    RewardOrFunction = Reward  # the parser of a config makes functions rewards
    Rewards = list[Reward]
"""The rewards of a training run; in Python also plain functions."""
