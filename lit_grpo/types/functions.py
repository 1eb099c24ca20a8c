"""Describe functions of the user's, and the errors that they raise."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = str(Path(__file__).parents[1]) + os.sep


def defined_at(function: Callable[..., Any]) -> tuple[Any, CodeType | None]:
    """Return what a callable runs, without decorators, and its code; a builtin's code is None."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    named = function if hasattr(function, "__qualname__") else type(function).__call__
    return named, getattr(named, "__code__", None)


def unfit_signature(
    function: Callable[..., Any], arguments: Sequence[str]
) -> inspect.Signature | None:
    """Return the signature of a function that cannot be called with these arguments by position.

    Nor can one that takes one of them under the name of another. None if the function can, or if
    its signature is not known, as when it is not written in Python.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return signature
    taken = zip(signature.parameters, arguments, strict=False)
    is_swapped = any(name != argument and name in arguments for name, argument in taken)
    return signature if is_swapped else None


def users_traceback(error: BaseException) -> str:
    """Return the traceback as text, from the user's first line on if it has one."""
    report = traceback.TracebackException.from_exception(error)
    is_users = [not frame.filename.startswith(PACKAGE) for frame in report.stack]
    first = is_users.index(True) if any(is_users) else 0
    report.stack = traceback.StackSummary.from_list(report.stack[first:])
    return "".join(report.format()).strip()
