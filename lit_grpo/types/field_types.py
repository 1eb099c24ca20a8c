"""Check that settings given in Python have the types that the command line checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Integral
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from lit_grpo.types.settings import setting_error

LISTS = (list, tuple, Sequence)
IN_WORDS = {
    bool: "True or False",
    str: "a text",
    int: "an integer",
    float: "a number",
    dict: "a dict",
    Mapping: "a dict",
    NoneType: "None",
}


def check_fields(key: str, config: Any) -> None:
    """Check the fields of a dataclass; the ranges of numbers are left to `check_range`.

    Args:
        key: Full key of the section in a config, such as ``model.objective.kl``.

    Raises:
        UserError: a field has a value of another type, or none of its choices.
    """
    kind: Any = type(config)
    for name, hint in _hints(kind).items():
        check_value(f"{key}.{name}", getattr(config, name), hint)


def check_init(key: str, kind: Any, given: Mapping[str, Any]) -> None:
    """Check the arguments of a constructor, which calls this first with its ``locals()``.

    Raises:
        UserError: as `check_fields`.
    """
    for name, hint in _hints(kind.__init__).items():
        if name in given:
            check_value(f"{key}.{name}", given[name], hint)


def check_value(key: str, value: Any, hint: Any) -> None:
    """Check one setting; hints that are not known here accept everything.

    Raises:
        UserError: the value is not of that type.
    """
    options = _options(hint)
    if not any(_fits(value, option) for option in options):
        raise setting_error(
            key, _either([word for one in options for word in _words(one)]), repr(value)
        )


@cache
def _hints(described: Any) -> dict[str, Any]:
    return get_type_hints(described)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if kind is Callable:
        return callable(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind in (float, Any) or not isinstance(kind, type) or Protocol in kind.__mro__:
        return True
    if kind in LISTS:
        allowed = _options(inner[0]) if inner else (Any,)
        is_list = isinstance(value, list | tuple)
        return is_list and all(any(_fits(item, one) for one in allowed) for item in value)
    return isinstance(value, (str, PathLike) if kind is str else kind)


def _words(hint: Any) -> list[str]:
    """Return what a type allows."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return [str(one) for one in inner]
    if kind is Callable:
        return ["a function"]
    if kind in LISTS:
        return [f"a list of {' or '.join(map(_plural, _options(inner[0])))}" if inner else "a list"]
    return [IN_WORDS.get(kind, f"of type {getattr(kind, '__name__', kind)}")]


def _plural(hint: Any) -> str:
    return {str: "texts", int: "integers"}.get(hint, getattr(hint, "__name__", str(hint)))


def _either(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
