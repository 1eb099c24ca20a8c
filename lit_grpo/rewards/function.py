"""Any reward function of the TRL form as a reward, unchanged.

It passes what the function asks for and refuses what it does not take; it never looks inside.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_grpo.rewards.reward import Reward, Value
from lit_grpo.types import Completion, Prompt

RESERVED = ("prompts", "completions", "completion_ids")
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionReward(Reward):
    """Calls ``f(prompts, completions, **columns) -> list[float | None]``, sync or async.

    The function is called once a group. ``prompts`` and ``completions`` are texts, or lists of
    messages when the prompt is a conversation. Every column of the row arrives under its name as a
    list of G equal values, ``answer`` and ``completion_ids`` too; a function without ``**kwargs``
    gets only those that it names.

    Args:
        function: ``module:function``, ``module.function``, ``path/to/file.py:function``, or a
            callable.
        kwargs: further keyword arguments. Each must be a named parameter of the function, since
            one that vanishes into its ``**kwargs`` would be a silent mistake.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        kwargs: dict[str, Any] | None = None,
        *,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        self.function = load_function(function) if isinstance(function, str) else function
        self.kwargs = dict(kwargs or {})
        super().__init__(name=name or _default_name(self.function), **settings)
        parameters = inspect.signature(self.function).parameters.values()
        self._named = [one.name for one in parameters if one.kind in NAMED]
        self._required = {
            one.name for one in parameters if one.kind in NAMED and one.default is one.empty
        }
        self._takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
        self._refuse_unknown_kwargs()

    @property
    def is_async(self) -> bool:
        function = self.function
        call = getattr(function, "__call__", None)  # noqa: B004 - an object with async __call__
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    def score_group(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Value]:
        return self.function(**self._arguments(prompt, completions))

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuses data without a column that the function requires."""
        for prompt in prompts:
            given = set(RESERVED) | set(_columns(prompt)) | set(self.kwargs)
            if missing := sorted(self._required - given):
                raise ValueError(
                    f"every column that {self.name} requires must be in the data, "
                    f"{', '.join(missing)} is missing from prompt {prompt.id}, which has "
                    f"{', '.join(sorted(_columns(prompt))) or 'none'}. Map the column in the "
                    "data module, set it in kwargs, or give the parameter a default."
                )

    def _arguments(self, prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
        size = len(completions)
        columns = {name: [value] * size for name, value in _columns(prompt).items()}
        if prompt.messages is None:
            prompts: list[Any] = [prompt.text] * size
            texts: list[Any] = [one.text for one in completions]
        else:
            prompts = [[dict(message) for message in prompt.messages] for _ in completions]
            texts = [[{"role": "assistant", "content": one.text}] for one in completions]
        ids = [list(one.token_ids) for one in completions]
        given = columns | {"prompts": prompts, "completions": texts, "completion_ids": ids}
        if not self._takes_all:
            given = {name: value for name, value in given.items() if name in self._named}
        return given | self.kwargs

    def _refuse_unknown_kwargs(self) -> None:
        accepted = [name for name in self._named if name not in RESERVED]
        for name in self.kwargs:
            if name not in accepted:
                near = difflib.get_close_matches(name, accepted, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ValueError(
                    f"kwargs must be named parameters of {self.name}, got {name!r} (it would not "
                    f"reach the function). It accepts {', '.join(accepted) or 'none'}.{hint}"
                )


def load_function(path: str) -> Callable[..., Any]:
    """The function at ``module:function``, ``module.function`` or ``file.py:function``.

    Raises:
        ValueError: there is no such module, file or function.
    """
    place, colon, name = path.rpartition(":")
    if not colon:
        place, _, name = path.rpartition(".")
    if not place or not name:
        raise ValueError(
            f"function must be module:function or path/to/file.py:function, got {path!r} "
            "(it is imported from there). Set function in the init_args of FunctionReward."
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [one for one in dir(module) if one[0] != "_"], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"function must exist, {place} has no function {name!r}.{hint}")
    return function


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise ValueError(
            f"function must be in a module that can be imported, got {name!r} ({error}). Install "
            "it, or name the file: path/to/file.py:function."
        ) from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(
            f"function must be in a file that exists, got {path} (looked in {Path.cwd()})."
        )
    name = f"{path.stem} at {path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, since dataclasses and pickle look a module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _default_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _columns(prompt: Prompt) -> Mapping[str, Any]:
    """The columns as TRL passes them: all but the prompt itself, and the gold as ``answer``."""
    gold = {} if prompt.answer is None else {"answer": prompt.answer}
    hidden = {"prompt", "completion", *RESERVED}
    columns = gold | dict(prompt.columns)
    return {name: value for name, value in columns.items() if name not in hidden}
