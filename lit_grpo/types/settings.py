"""Check settings, with the same wording for every value that is out of range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from inspect import isabstract
from math import inf
from numbers import Real
from types import UnionType
from typing import Any, TypeGuard, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from lit_grpo.types.errors import UserError

_SHOWN_CHARACTERS = 80
"""Longest description of a value that a message shows."""


def setting_error(key: str, rule: str, value: object, why: str = "") -> UserError:
    """Return the error for one setting: ``epochs must be >= 1, got 0 (why). Set model.epochs.``

    Args:
        key: Full key of the setting in a config, such as ``model.update.epochs``.
        rule: The values that are allowed, such as ``>= 1``.
        value: The value that was given.
        why: What would go wrong with it.
    """
    name = key.removeprefix("model.").rpartition("init_args.")[2]
    reason = f" ({why})" if why else ""
    return UserError(f"{name} must be {rule}, got {value}{reason}. Set {key}.")


def check_range(
    key: str,
    value: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    is_finite: bool = False,
    why: str = "",
) -> None:
    """Check that a number lies in a range; None means that the setting is off, and passes.

    Args:
        key: As in `setting_error`.
        value: The number that was given.
        at_least: Inclusive lower bound.
        above: Exclusive lower bound.
        at_most: Inclusive upper bound.
        is_finite: Refuse infinity.
        why: As in `setting_error`.

    Raises:
        UserError: the value is out of range, NaN or not a number.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise setting_error(key, "a number", repr(value))
    is_in_range = (
        (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
    )
    if not is_in_range or value != value:
        raise setting_error(key, _range_in_words(at_least, above, at_most), value, why)
    if is_finite and value == inf:
        raise setting_error(key, "finite", value, why)


def is_http_address(text: str) -> bool:
    """Return whether a text is an address with ``http://`` or ``https://`` and a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid host or port
        return False


def check_type(key: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Check that a setting given in Python has the right type, which the command line checks.

    Raises:
        UserError: the value is of another type.
    """
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        rule = f"of type {' or '.join(one.__name__ for one in kinds)}"
        if isinstance(value, type) and issubclass(value, kind):
            raise of_class(key, rule, value)
        is_item = isinstance(value, str) or not isinstance(value, Iterable | None)
        fix = "write [...] around it" if list in kinds and is_item else as_object(value, kinds)
        raise setting_error(key, rule, shown(value), fix)


def of_class(key: str, rule: str, given: type) -> UserError:
    """Return the error for a class given in place of an object of it."""
    name = given.__name__
    return setting_error(key, rule, f"the class {name}", f"write {name}(...)")


def as_object(value: object, kinds: Iterable[object]) -> str:
    """Return how settings that were given as in a config become an object in Python.

    Args:
        value: What was given: ``{"max_tokens": 8}``, or a text or a number.
        kinds: Types that are allowed.

    Returns:
        Such as ``write Sampling(max_tokens=8), of lit_grpo.rollout``; empty if there is no way.
    """
    if not isinstance(value, Mapping | str | Real):
        return ""
    for kind in filter(_is_of_package, kinds):
        package = ".".join(kind.__module__.split(".")[:2])
        if not isabstract(kind):
            given = _as_arguments(kind, value) if isinstance(value, Mapping) else "..."
            return f"write {kind.__name__}({given}), of {package}"
        subclasses: list[type] = kind.__subclasses__()
        for name in (one.__name__ for one in subclasses):
            if value and str(value).lower() in name.lower():
                return f"write {name}(...), of {package}"
    return ""


def _as_arguments(kind: type, settings: Mapping[str, Any]) -> str:
    """Return ``coef=0.1, kl=KLTerm(...)``, as an object of a class takes settings of a config."""
    hints: dict[str, Any] = {}
    with suppress(KeyError, NameError, TypeError):
        hints = get_type_hints(vars(kind)["__init__"])
    given = []
    for name, value in settings.items():
        hint, text = hints.get(name), repr(value)
        kinds = (one for one in options_of(hint) if isinstance(one, type))
        inner = next(filter(is_dataclass, kinds), None)
        if isinstance(value, Mapping) and inner is not None:
            text = f"{inner.__name__}({_as_arguments(inner, value)})"
        given.append(f"{name}={text}")
    return ", ".join(given)


def options_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_of_package(kind: object) -> TypeGuard[type]:
    return isinstance(kind, type) and kind.__module__.startswith("lit_grpo.")


def shown(value: object) -> str:
    """Return the ``repr`` of a value for a message, or what it is if that is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"a {type(value).__name__}"


def _range_in_words(at_least: float | None, above: float | None, at_most: float | None) -> str:
    if at_least is not None and at_most is not None:
        return f"from {_short(at_least)} to {_short(at_most)}"
    rules = [
        *([f">= {_short(at_least)}"] if at_least is not None else []),
        *(["positive" if above == 0 else f"> {_short(above)}"] if above is not None else []),
        *([f"<= {_short(at_most)}"] if at_most is not None else []),
    ]
    return " and ".join(rules) or "a number"


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def list_some(names: Sequence[str], at_most: int, separator: str = ", ") -> str:
    """Return the first names as a list, and how many others there are: ``a, b and 3 more``."""
    more = len(names) - at_most
    shown = separator.join(names[:at_most])
    before = "" if separator == ", " else separator.rstrip()
    return f"{shown}{before} and {more} more" if more > 0 else shown
