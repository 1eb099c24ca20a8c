"""Recognise the code of a user's rewards and functions, so that a resumed run can tell changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any
from zlib import crc32

from lit_grpo.rewards import FunctionReward, ProcessReward, Reward
from lit_grpo.types.functions import defined_at, undecorated
from lit_grpo.types.plain import is_plain

NOT_USERS = ("lit_grpo", "builtins", "abc", "typing")


def describe_reward_code(reward: Reward) -> str | None:
    """Return a checksum of the source of a user's function or class; None if there is none to read.

    It covers the function, or the class and its bases, but not what they call: the rest
    of a script may change without a change of the reward.
    """
    if isinstance(reward, ProcessReward):
        return describe_reward_code(reward.reward)
    function = function_of(reward)
    of_function = [] if function is None else [defined_at(function)[0]]
    return _checksum(map(_users_source, [*of_function, *type(reward).__mro__]))


def describe_function_code(function: Callable[..., Any]) -> str | None:
    """Return the same for a function, a callable object or a bound method."""
    called = undecorated(function)
    owner = called.__self__ if isinstance(called, MethodType) else called
    definition, code = defined_at(called)
    if code is not None and code.co_name == "<lambda>":
        return _checksum([_lambda_source(code)])
    return _checksum(map(_users_source, [definition, *type(owner).__mro__]))


def function_of(reward: Reward) -> Callable[..., Any] | None:
    """Return the function that a reward calls; None if its class scores by itself."""
    if isinstance(reward, ProcessReward):
        return function_of(reward.reward)
    return reward.function if isinstance(reward, FunctionReward) else None


def _checksum(sources: Iterable[str]) -> str | None:
    whole = "".join(sources)
    return f"{crc32(whole.encode(errors='surrogatepass')):08x}" if whole else None


def _users_source(named: Any) -> str:
    if (named.__module__ or "builtins").partition(".")[0] in NOT_USERS:
        return ""
    try:
        return inspect.getsource(named)
    except (OSError, TypeError, SyntaxError):  # typed in, a class of a notebook, or no Python
        return _without_source(named)


def _without_source(named: Any) -> str:
    """Return what a function does as text, or what the functions and values of a class are."""
    if not isinstance(named, type):
        function = inspect.unwrap(getattr(named, "fget", None) or getattr(named, "__func__", named))
        if not isinstance(function, FunctionType):
            return ""
        given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return f"{_compiled(function.__code__)} {[one for one in given if is_plain(one)]}"
    parts = {name: one for name, one in vars(named).items() if not name.startswith("__")}
    parts["__init__"] = vars(named).get("__init__")
    return "".join(
        f"{name}: {_constant(one) if is_plain(one) else _without_source(one)}\n"
        for name, one in parts.items()
        if not isinstance(one, type)
    )


def _compiled(code: CodeType) -> str:
    """Return the instructions of a function as text, without where it is written."""
    constants = [*map(_constant, code.co_consts)]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return _compiled(value)
    return repr(sorted(value, key=repr) if isinstance(value, frozenset) else value)


def _lambda_source(code: CodeType) -> str:
    """Return the names and the expression of a lambda; ``getsource`` has whole lines, or less."""
    starts, ends = [], []
    for line, last_line, column, last_column in code.co_positions():
        if line and last_line and column is not None and last_column:  # belongs to the expression
            starts.append((line, column))
            ends.append((last_line, last_column))
    try:
        lines = [line.encode() for line in inspect.findsource(code)[0]]
        (first, start), (last, end) = min(starts), max(ends)
        lines[last - 1] = lines[last - 1][:end]
    except (OSError, ValueError, IndexError):  # no source or positions, or the file has changed
        return ""
    expression = b"".join(lines[first - 1 : last])[start:]
    return f"{code.co_varnames} {expression.decode(errors='replace')}"
