"""Leave texts that may be secret out of settings that are shown or shared."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Mapping
from typing import Any

SECRET = re.compile(
    r"(key|token|secret|password|credential|authorization|cookie)s?(\W|_|$)", re.IGNORECASE
)
NAMES_A_VARIABLE = re.compile(r"_variable$")
ADDRESS = re.compile(r"(\w+://)(?:[^/\s@]*@)?([^\s?]*)(?:\?\S*)?")
REMOVED = "(removed)"


def without_secrets(value: Any, key: str = "") -> Any:
    """Return plain settings without texts that may be secret.

    These are the texts under a key such as ``api_key``, and the logins and queries of addresses.
    """
    if isinstance(value, Mapping):
        return {name: without_secrets(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner, key) for inner in value]
    if not isinstance(value, str):
        return value
    if SECRET.search(key) and not NAMES_A_VARIABLE.search(key):
        return REMOVED
    return ADDRESS.sub(r"\1\2", value)


def change_without_secrets(change: str) -> str:
    """Return a change, ``model.group_size: 4 -> 8``, without texts that may be secret."""
    key, _, values = change.partition(": ")
    shown = [str(without_secrets(_parsed(one), key)) for one in values.split(" -> ")]
    return f"{key}: {' -> '.join(shown)}"


def _parsed(text: str) -> Any:
    """Return the value that a text stands for: a number is not a secret (``max_tokens``)."""
    try:
        return literal_eval(text)
    except (ValueError, TypeError, SyntaxError):
        return text
