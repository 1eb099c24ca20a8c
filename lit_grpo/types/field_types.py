"""Check that settings given in Python have the types that the command line checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from inspect import signature
from numbers import Integral, Real
from os import PathLike
from types import NoneType
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from lit_grpo.types.foreign_values import counterpart
from lit_grpo.types.settings import as_object, of_class, options_of, setting_error, shown
from lit_grpo.types.spelling import closest

LISTS = (list, tuple, Sequence)
IN_WORDS = {
    bool: "True or False",
    str: "a string",
    int: "an integer",
    float: "a number",
    dict: "a dict",
    Mapping: "a dict",
    NoneType: "None",
}

Class = TypeVar("Class", bound=type)


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


def checks_types(of: Class) -> Class:
    """Let the constructor of a plugin check the types of its arguments; its signature stays."""
    init = of.__init__  # type: ignore[misc]
    parameters = signature(init)

    @wraps(init)
    def checked(self: object, *args: object, **keywords: object) -> None:
        with suppress(TypeError):  # too many or unknown ones, which the constructor refuses
            given = parameters.bind_partial(self, *args, **keywords).arguments
            check_init(f"{type(self).__name__}.init_args", of, given)
        init(self, *args, **keywords)

    of.__init__ = checked  # type: ignore[misc]
    return of


def check_value(key: str, value: Any, hint: Any) -> None:
    """Check one setting; hints that are not known here accept everything.

    Raises:
        UserError: the value is not of that type.
    """
    options = options_of(hint)
    if not any(_fits(value, option) for option in options):
        rule = _either([word for one in options for word in _words(one)])
        kinds = tuple(one for one in options if isinstance(one, type))
        if isinstance(value, type) and issubclass(value, kinds):
            raise of_class(key, rule, value)
        how = (
            _as_function(value, options)
            or _as_choice(key, value, options)
            or as_object(value, options)
        )
        raise setting_error(key, rule, shown(value), how)


def _as_choice(key: str, value: Any, options: tuple[Any, ...]) -> str:
    """Return which choice is meant by a text, or by an object such as ``torch.bfloat16``."""
    allowed = [
        one for option in options if get_origin(option) is Literal for one in get_args(option)
    ]
    choices = [one for one in allowed if isinstance(one, str)]
    if isinstance(value, str | bool):
        ours = counterpart(key, str(value))
        is_choice = ours.split(",")[0] in choices
        meant = ours if is_choice else closest(str(value), choices)
        return f"did you mean {meant}?" if meant else ""
    name = str(value).rpartition(".")[2]
    return f"write {name!r}" if name in choices else ""


def _as_function(value: Any, options: tuple[Any, ...]) -> str:
    """Return what to pass in place of the path of a function, if one is allowed."""
    is_allowed = any(get_origin(option) is Callable for option in options)
    if is_allowed and isinstance(value, str) and "." in value:
        return "in Python pass the function itself, which a config names by its path"
    return ""


@cache
def _hints(described: Any) -> dict[str, Any]:
    return get_type_hints(described)


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if kind is Callable:
        return callable(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if kind is Any or not isinstance(kind, type) or Protocol in kind.__mro__:
        return True
    if kind in LISTS:
        allowed = options_of(inner[0]) if inner else (Any,)
        is_list = isinstance(value, list | tuple)
        return is_list and all(any(_fits(item, one) for one in allowed) for item in value)
    if kind in (dict, Mapping) and len(inner) == 2:
        allowed = options_of(inner[1])
        is_dict = isinstance(value, Mapping)
        return is_dict and all(any(_fits(one, kind) for kind in allowed) for one in value.values())
    return isinstance(value, (str, PathLike) if kind is str else kind)


def _words(hint: Any) -> list[str]:
    """Return what a type allows."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return [str(one) for one in inner]
    if kind is Callable:
        return ["a function"]
    if kind in LISTS:
        return [f"a list of {_of(inner[0])}" if inner else "a list"]
    if kind in (dict, Mapping) and len(inner) == 2 and inner[1] is not Any:
        return [f"a dict of {_of(inner[1])}"]
    return [IN_WORDS.get(kind, f"of type {getattr(kind, '__name__', kind)}")]


def _of(inner: Any) -> str:
    return " or ".join(map(_plural, options_of(inner)))


def _plural(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return _either([str(one) for one in get_args(hint)])
    return {str: "strings", int: "integers"}.get(hint, getattr(hint, "__name__", str(hint)))


def _either(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
