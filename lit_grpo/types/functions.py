"""Find where a user's function stands, for messages that name it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any


def defined_at(function: Callable[..., Any]) -> tuple[Any, CodeType | None]:
    """Return what a callable runs, without decorators, and its code; None for that of a builtin."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    named = function if hasattr(function, "__qualname__") else type(function).__call__
    return named, getattr(named, "__code__", None)
