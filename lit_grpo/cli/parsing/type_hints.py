"""Read the type hints of keys: their names for messages, their choices and classes."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections import abc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torch import Tensor


def type_of(parser: Any, key: str) -> Any:
    """Return the type hint of a key, or None if the parser has none."""
    action = _action(parser, key)
    return getattr(action, "_typehint", None) or getattr(action, "type", None)


def default_of(parser: Any, key: str) -> Any:
    """Return the default of a key; None if it has none."""
    return getattr(_action(parser, key), "default", None)


def _action(parser: Any, key: str) -> Any:
    return next((action for action in parser._actions if action.dest == key), None)


def type_name(hint: Any) -> str:
    """Return a type hint in readable form: ``list[Reward]``, ``one of clip, cispo``.

    A tensor, which a config cannot have, is left out.
    """
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(type_name(one) for one in get_args(hint) if one is not Tensor)
    if hint is type(None):
        return "null"
    if get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis:
        return f"list[{type_name(get_args(hint)[0])}]"
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"(\w+\.)+(?=\w)", "", text)


def admits_null(hint: Any) -> bool:
    """Return whether null is a value of a type hint."""
    if get_origin(hint) in (Union, UnionType):
        return any(map(admits_null, get_args(hint)))
    return hint is type(None) or (get_origin(hint) is Literal and None in get_args(hint))


def admits_text(hint: Any) -> bool:
    """Return whether any text, or any path, is a value of a type hint."""
    if get_origin(hint) in (Union, UnionType):
        return any(map(admits_text, get_args(hint)))
    return hint in (str, Path)


def find_object(path: str) -> Any:
    """Return the class or function of a path in a config; None if there is none."""
    with suppress(ImportError, AttributeError, ValueError):
        return pkgutil.resolve_name(path)
    return None


def takes_function(hint: Any) -> bool:
    """Return whether a type hint stands for any function, or includes such a hint."""
    is_own = get_origin(hint) is abc.Callable and get_args(hint)[-1] is Any
    return is_own or any(map(takes_function, get_args(hint)))


def literals(hint: Any) -> Iterator[str]:
    """Yield the choices of a type hint, ``null`` among them."""
    if hint is type(None):
        yield "null"
    for argument in get_args(hint):
        if get_origin(hint) is Literal:
            yield str(argument)
        else:
            yield from literals(argument)


def class_names(hint: Any) -> Iterator[str]:
    """Yield the names of all concrete classes that a type hint accepts."""
    return (one.__name__ for one in classes(hint))


def classes(hint: Any) -> Iterator[type]:
    """Yield all concrete classes that a type hint accepts."""
    for argument in get_args(hint):
        yield from classes(argument)
    if isinstance(hint, type) and not get_args(hint) and hint.__module__ != "builtins":
        if not inspect.isabstract(hint) and not hint.__name__.startswith("_"):
            yield hint
        subclasses: list[type] = hint.__subclasses__()
        for subclass in subclasses:
            yield from classes(subclass)
