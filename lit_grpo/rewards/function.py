"""Any reward function of TRL's or of verl's form as a reward, unchanged.

It passes what the function asks for and refuses what it does not take; it never looks inside.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.rewards.load_function import load_function
from lit_grpo.rewards.reward import Reward, Value
from lit_grpo.types import Completion, Prompt, UserError

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionReward(Reward):
    """Calls a function of TRL's or, when it has a parameter ``solution_str``, of verl's form.

    TRL: ``f(prompts, completions, **columns) -> list[float | None]``, once a group. ``prompts``
    and ``completions`` are texts, or lists of messages when the prompt is a conversation. Every
    column of the row arrives under its name as a list of G equal values, ``answer`` and
    ``completion_ids`` too.

    verl: ``f(data_source, solution_str, ground_truth, extra_info) -> float | dict``, once a
    completion. ``ground_truth`` is the one in the column ``reward_model``, else the gold answer;
    ``data_source`` and ``extra_info`` are columns, and ``extra_info`` is empty without one. The
    value of a dict is its ``score``.

    Either may be ``async def``. A function without ``**kwargs`` gets only what it names.

    Args:
        function: ``module:function``, ``module.function``, ``path/to/file.py:function``, or a
            callable.
        reward_kwargs: further keyword arguments. Each must be a named parameter of the function,
            since one that vanishes into its ``**kwargs`` would be a silent mistake.
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
        self.reward_kwargs = dict(reward_kwargs or {})
        super().__init__(name=name or _default_name(self.function), **settings)
        parameters = inspect.signature(self.function).parameters.values()
        self._named = [one.name for one in parameters if one.kind in NAMED]
        self._required = {
            one.name for one in parameters if one.kind in NAMED and one.default is one.empty
        }
        self._takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
        self._refuse_unknown_kwargs()

    @property
    def is_grouped(self) -> bool:
        return self._form is TRL

    @property
    def is_async(self) -> bool:
        function = self.function
        call = getattr(function, "__call__", None)  # noqa: B004 - an object with async __call__
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    def score(self, prompt: Prompt, completion: Completion) -> Value | Awaitable[Value]:
        result = self._call(self._form.row(prompt) | {"solution_str": completion.text})
        return _value_of(result) if inspect.isawaitable(result) else _value(result)

    def score_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Sequence[Value] | Awaitable[Sequence[Value]]:
        size = len(completions)
        columns = {name: [value] * size for name, value in self._form.row(prompt).items()}
        return self._call(columns | _conversations(prompt, completions))

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuses data without a column that the function requires."""
        for prompt in prompts:
            row = self._form.row(prompt)
            given = {*self._form.reserved, *row, *self.reward_kwargs}
            if missing := sorted(self._required - given):
                raise UserError(
                    f"every column that {self.name} requires must be in the data, "
                    f"{', '.join(missing)} is missing from prompt {prompt.id}, which has "
                    f"{', '.join(sorted(row)) or 'none'}. Map the column in the data module, set "
                    "it in reward_kwargs, or give the parameter a default."
                )

    @property
    def _form(self) -> Form:
        return VERL if "solution_str" in self._named else TRL

    def _call(self, given: dict[str, Any]) -> Any:
        if not self._takes_all:
            given = {name: value for name, value in given.items() if name in self._named}
        return self.function(**(given | self.reward_kwargs))

    def _refuse_unknown_kwargs(self) -> None:
        accepted = [name for name in self._named if name not in self._form.reserved]
        for name in self.reward_kwargs:
            if name not in accepted:
                near = difflib.get_close_matches(name, accepted, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise UserError(
                    f"reward_kwargs must be named parameters of {self.name}, got {name!r} (it "
                    f"would not reach the function). It accepts "
                    f"{', '.join(accepted) or 'none'}.{hint}"
                )

    def __getstate__(self) -> dict[str, Any]:
        """A function that came from a path goes to another process as that path."""
        return {name: value for name, value in vars(self).items() if name != "function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.function = _resolve(self._source)


def _resolve(function: str | Callable[..., Any]) -> Callable[..., Any]:
    return load_function(function) if isinstance(function, str) else function


def _default_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _trl_row(prompt: Prompt) -> dict[str, Any]:
    """All columns but the prompt itself, and the gold as ``answer``."""
    gold = {} if prompt.answer is None else {"answer": prompt.answer}
    hidden = {"prompt", "completion", *TRL.reserved}
    columns = gold | dict(prompt.columns)
    return {name: value for name, value in columns.items() if name not in hidden}


def _verl_row(prompt: Prompt) -> dict[str, Any]:
    """What verl takes of a row; a data source or a gold that the row lacks is left out."""
    columns = prompt.columns
    marked = columns.get("reward_model")
    gold = marked.get("ground_truth") if isinstance(marked, Mapping) else None
    row = {
        "data_source": columns.get("data_source"),
        "ground_truth": prompt.answer if gold is None else gold,
        "extra_info": columns.get("extra_info") or {},
    }
    return {name: value for name, value in row.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Form:
    """What functions of one form are called with."""

    reserved: tuple[str, ...]
    """Arguments made of the completions."""
    row: Callable[[Prompt], dict[str, Any]]
    """Arguments made of the row."""


TRL = Form(reserved=("prompts", "completions", "completion_ids"), row=_trl_row)
VERL = Form(reserved=("solution_str",), row=_verl_row)


def _conversations(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
    """TRL's arguments made of the completions: texts, or messages in a conversation."""
    ids = [list(one.token_ids) for one in completions]
    if prompt.messages is None:
        prompts: list[Any] = [prompt.text for _ in completions]
        texts: list[Any] = [one.text for one in completions]
    else:
        prompts = [[dict(message) for message in prompt.messages] for _ in completions]
        texts = [[{"role": "assistant", "content": one.text}] for one in completions]
    return {"prompts": prompts, "completions": texts, "completion_ids": ids}


async def _value_of(result: Awaitable[Any]) -> Value:
    return _value(await result)


def _value(result: Any) -> Value:
    """The value of what a function of verl's form returned; the boundary judges the rest."""
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise UserError(f"a dict must have the key 'score', got {', '.join(map(str, result))}")
    return result["score"]
