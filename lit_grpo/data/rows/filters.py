"""Find values in the columns of a row, and decide by them whether a row is kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any

from lit_grpo.types.spelling import did_you_mean

MISSING = object()
"""Stands for a value where there is no such column."""


def find_value(columns: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column.

    Args:
        columns: The columns of a row.
        name: Name of a column; ``a.b`` is the field b of the nested column a, and ``a[].b`` that
            field of each item of the list a.

    Returns:
        `MISSING` if the column, or its field in any item, is not there.
    """
    if name in columns:
        return columns[name]
    listed, is_list, rest = name.partition("[]")
    value: Any = columns
    for part in listed.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    if not is_list or value is None:
        return value
    if not isinstance(value, list | tuple):
        return MISSING
    inner = rest.removeprefix(".")
    found = [find_value(one, inner) if isinstance(one, Mapping) else MISSING for one in value]
    return MISSING if any(one is MISSING for one in found) else found


def failed_filter(columns: Mapping[str, Any], where: Mapping[str, Any]) -> str | None:
    """Return the name of the first filter that a prepared row does not pass; None if it passes all.

    A filter names a column, ``prompt_characters``, ``answer_characters``, ``num_answers`` or
    ``gold_range``, the difference between the best and the worst gold score.

    Args:
        columns: The columns of the row.
        where: By column ``[lowest, highest]``, of which either may be None, a value, or a list of
            values. None in the data passes no range. A text is compared as the number, or the truth
            value, that it writes if the filter has only such: every value of CSV is a text.
    """
    for name, allowed in where.items():
        if (derived := _DERIVED.get(name)) and name not in columns:
            value = derived.derive(columns)
        else:
            value = find_value(columns, name)
        if not _passes(None if value is MISSING else _as_wanted(value, allowed), allowed):
            return name
    return None


def with_columns(where: Mapping[str, Any], rows: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the filters whose columns some of these rows have."""
    return {
        name: allowed
        for name, allowed in where.items()
        if name in _DERIVED or any(find_value(row, name) is not MISSING for row in rows)
    }


def absent_column(where: Mapping[str, Any], rows: Collection[Mapping[str, Any]]) -> str | None:
    """Describe a filter whose column none of these rows has; return None if there is none."""
    there = with_columns(where, rows)
    absent = next((name for name in where if name not in there), None)
    if absent is None:
        return None
    columns = [*dict.fromkeys(chain.from_iterable(rows))]
    hint = did_you_mean(absent, [*columns, *_DERIVED])
    return f"no row has the column {absent!r}; they have {', '.join(columns)}.{hint}"


def columns_of(where: Mapping[str, Any]) -> set[str]:
    """Return the columns that the filters read, if they exist."""
    tops = {re.split(r"\.|\[\]", name)[0] for name in where}
    found = (_DERIVED[name].of for name in where if name in _DERIVED)
    return {*where} | tops | {*chain.from_iterable(found)}


def _as_wanted(value: Any, allowed: Any) -> Any:
    if not isinstance(value, str):
        return value
    listed = allowed if isinstance(allowed, list) else [allowed]
    wanted = [one for one in listed if one is not None]
    if not all(isinstance(one, Real) for one in wanted):
        return value
    if all(isinstance(one, bool) for one in wanted):
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    with suppress(ValueError):
        return float(value)
    return value


def _passes(value: Any, allowed: Any) -> bool:
    match allowed:
        case [low, high] if is_bound(low) and is_bound(high):
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            return is_number and (low is None or value >= low) and (high is None or value <= high)
        case [*_]:
            return value in allowed
        case _:
            return bool(value == allowed)


def is_bound(value: Any) -> bool:
    """Return whether a value may be an end of a range."""
    return value is None or (isinstance(value, Real) and not isinstance(value, bool))


def _prompt_characters(columns: Mapping[str, Any]) -> int:
    if columns.get("messages") is None:
        return len(columns.get("prompt") or "")
    return sum(len(one["content"]) for one in columns["messages"] if one.get("content"))


def _length(name: str) -> Callable[[Mapping[str, Any]], int | None]:
    def of(columns: Mapping[str, Any]) -> int | None:
        value = columns.get(name)
        is_number = isinstance(value, int | float)
        return None if value is None else len(str(value) if is_number else value)

    return of


def _gold_range(columns: Mapping[str, Any]) -> float | None:
    scores = columns.get("gold_scores")
    return max(scores) - min(scores) if scores else None


@dataclass(frozen=True, slots=True)
class _Derived:
    """A value that prepared rows can be filtered by."""

    of: tuple[str, ...]
    """The columns that it is made from."""
    derive: Callable[[Mapping[str, Any]], float | None]


_DERIVED: Mapping[str, _Derived] = {
    "prompt_characters": _Derived(("prompt", "messages"), _prompt_characters),
    "answer_characters": _Derived(("answer",), _length("answer")),
    "num_answers": _Derived(("answers",), _length("answers")),
    "gold_range": _Derived(("gold_scores",), _gold_range),
}
