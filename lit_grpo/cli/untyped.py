"""Refuse classes that lack a required argument: without a type, the parser sets it to null."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

from jsonargparse import Namespace

from lit_grpo.types import UserError


def refuse_missing(config: Any) -> None:
    """Check that no class anywhere in a config lacks a required argument.

    Raises:
        UserError: one does.
    """
    for class_path, arguments in _classes_in(config):
        untyped = _untyped(class_path)
        for name in (name for name, value in vars(arguments).items() if value is None):
            if name in untyped:
                raise UserError(
                    f"{class_path} needs {name}, which is not set. Set {name} in its init_args, or "
                    "give the parameter a default."
                )


def _untyped(class_path: str) -> set[str]:
    """Return the names of the parameters of a class that have neither a type nor a default."""
    try:
        parameters = inspect.signature(pkgutil.resolve_name(class_path)).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError):  # such as a class written in C
        return set()
    empty = inspect.Parameter.empty
    return {one.name for one in parameters if one.annotation is empty and one.default is empty}


def _classes_in(node: Any) -> Iterator[tuple[str, Namespace]]:
    """Yield the path of every class in a config, and its arguments."""
    if isinstance(node, Namespace):
        arguments = node.get("init_args")
        if "class_path" in node and isinstance(arguments, Namespace):
            yield node.class_path, arguments
        node = vars(node)
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from _classes_in(child)
