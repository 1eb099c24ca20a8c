"""Values that the parser would read as something else, and required arguments without a type.

For an argument without a type the parser would read the text "1" as a number, and set a missing one
to null.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
from collections.abc import Iterator
from functools import wraps
from types import NoneType
from typing import Any, Union, get_args, get_origin

from jsonargparse import Namespace, _typehints
from jsonargparse._util import NestedArg

from lit_grpo.cli.parsing.config_checks import explain_other_base
from lit_grpo.types import UserError


class CommandLineText(str):
    """A word of the command line for an argument of a class, which is read as YAML."""

    __slots__ = ()


def keep_texts() -> None:
    """Let jsonargparse keep a text that any value could replace: in a list, a dict, a saved config.

    Words of the command line are marked, so that they can be told from texts of YAML. A text that
    YAML would read as another number than it looks like is refused.
    """
    adapt: Any = _typehints.adapt_typehints

    @wraps(adapt)
    def adapt_others(val: Any, typehint: Any, *args: Any, **kwargs: Any) -> Any:
        is_whole = kwargs.get("orig_val") is val  # of an argument, so it may be a word
        if not is_whole and type(val) is str and _typehints.accepts_any_value(typehint):
            return val
        if isinstance(val, NestedArg) and type(val.val) is str and _is_argument(val.key):
            val = val._replace(val=CommandLineText(val.val))
        adapted = adapt(
            str(val) if type(val) is CommandLineText else val, typehint, *args, **kwargs
        )
        if why := explain_other_base(str(kwargs.get("orig_val")), adapted):
            raise ValueError(why)
        return adapted

    _typehints.adapt_typehints = adapt_others


def keep_nulls() -> None:
    """Let jsonargparse hand null, a list or a dict for a nested key to the class that has the key.

    It writes such a value as Python prints it: null for ``model.engine.launch.max_model_len`` would
    be the text None.
    """
    adapt: Any = _typehints.adapt_class_type

    @wraps(adapt)
    def adapt_nested(value: Any, *args: Any, **kwargs: Any) -> Any:
        given = value.get("init_args")
        if isinstance(given, NestedArg) and isinstance(given.val, dict | list | NoneType):
            value["init_args"] = given._replace(val=json.dumps(given.val))
        return adapt(value, *args, **kwargs)

    _typehints.adapt_class_type = adapt_nested


def _is_argument(key: str) -> bool:
    return "." not in key and key not in ("class_path", "init_args", "dict_kwargs")


def takes_any_text(action: Any) -> bool:
    """Return whether an argument has no type, or only the type of a null or text default."""
    hint = getattr(action, "_typehint", None)
    parts = get_args(hint) if get_origin(hint) is Union else (hint,)
    others = [one for one in parts if not _typehints.accepts_any_value(one)]
    return len(others) < len(parts) and all(one in (str, type(None)) for one in others)


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
