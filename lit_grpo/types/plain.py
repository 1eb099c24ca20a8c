"""Settings as plain values, which any file can hold, and what differs in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np


def bare_name(value: Any) -> str:
    """Return the name of a function or class, or of the class of another object."""
    named = value if callable(value) else type(value)
    return str(getattr(named, "__qualname__", type(value).__qualname__))


def import_path(value: Any) -> str:
    """Return ``module.name`` of a function or class, or of the class of another object."""
    while isinstance(value, partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def described(given: object) -> str:
    """Return what a value is, where another one was expected: ``an object of type Policy``."""
    if given is None:
        return "None"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return f"an object of type {type(given).__name__}"


def plain_value(value: Any, name: Callable[[Any], str] = bare_name) -> Any:
    """Return a setting as numbers, texts, lists and dicts.

    Args:
        name: Names functions and objects. What is compared has bare names: a script is the module
            ``__main__`` or another one, depending on how it was started.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"class": type(value).__qualname__} | plain_value(values, name)
    if isinstance(value, Mapping):
        return {str(key): plain_value(inner, name) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        ordered = value if isinstance(value, list | tuple) else sorted(value, key=str)
        return [plain_value(inner, name) for inner in ordered]
    return name(value)


def is_plain(value: Any) -> bool:
    """Return whether a value is None, a number, a text, or a list, tuple or dict of such values.

    NaN is not, since it is never equal to itself; nor is an object of a subclass.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is dict:
        return all(map(is_plain, [*value.keys(), *value.values()]))
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or (type(value) in (bool, int, float, str) and value == value)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs in settings that both have; releases differ in their keys."""
    both = sorted(before.keys() & now.keys())
    return [f"{one}: {before[one]} -> {now[one]}" for one in both if before[one] != now[one]]
