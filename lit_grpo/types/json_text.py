"""Parse JSON that a user wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 200
"""How deeply lists and objects may be nested: less than Python's recursion limit allows a dump."""


def parse_json(
    text: str | bytes, hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the value of a JSON text.

    Args:
        hook: Makes a value of the pairs of an object; None makes a dict.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has an integer that is too long.
    """
    try:
        value = json.loads(text, object_pairs_hook=hook)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        if not str(error).startswith("Exceeds the limit"):
            raise
        digits = sys.get_int_max_str_digits()
        raise ValueError(f"it has an integer of more than {digits} digits") from None
    if _num_openings(text) > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _num_openings(text: str | bytes) -> int:
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _too_deep() -> ValueError:
    return ValueError(f"its lists and objects are nested more than {MAX_DEPTH} deep")


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        parents = [one for one in level if isinstance(one, list | dict)]
        level = [
            child for one in parents for child in (one.values() if isinstance(one, dict) else one)
        ]
        if not parents:
            return False
    return True
