"""Environment variables that win over a config: ablation switches for a sweep of one config.

A class names them, ``overridden_by_environment = {"lambda_info": "REWARD_LAMBDA_INFO"}``; wherever
a config has that class or a subclass, the variable's value takes the place of the argument's.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_grpo.cli.errors import type_name
from lit_grpo.types import UserError

PREFIX = "REWARD_"
"""Of a variable that is taken for a switch: a warning says when nothing reads it."""

log = logging.getLogger(__name__)


def override(config: Namespace) -> list[str]:
    """Puts the values of variables into a parsed config; a line for each says what it replaced.

    Raises:
        ValueError: a value that the argument cannot have.
    """
    lines = []
    for path, node in _classes(config):
        kind, arguments = pkgutil.resolve_name(node["class_path"]), node["init_args"]
        for key, variable in getattr(kind, "overridden_by_environment", {}).items():
            if variable in os.environ and key in arguments:  # a subclass may not take it
                place = f"{path}.init_args.{key}"
                value = _read(variable, kind, key, place)
                lines.append(f"{variable}={value} wins over {place}: {arguments[key]}")
                arguments[key] = value
    return lines


@rank_zero_only
def tell_overridden(lines: Sequence[str]) -> None:
    """Logs what ``override`` has replaced, and switches that it found no use for."""
    for line in lines:
        log.warning("%s", line)
    read = {line.partition("=")[0] for line in lines}
    for variable in sorted(os.environ.keys() - read):
        if variable.startswith(PREFIX):
            log.warning("%s is set, but nothing in the config reads it", variable)


def _classes(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every part of a config that is a class with arguments, and the key it stands under."""
    children = dict(_children(node))
    if "class_path" in children and "init_args" in children:
        yield path, node
    for key, child in children.items():
        yield from _classes(child, f"{path}.{key}" if path else str(key))


def _children(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, Namespace | dict):
        return (vars(node) if isinstance(node, Namespace) else node).items()
    return enumerate(node) if isinstance(node, list | tuple) else ()


def _read(variable: str, kind: type, key: str, place: str) -> Any:
    """The value of a variable, read as the command line would read the argument."""
    expected = _type_of(kind, key)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=expected)
    text = os.environ[variable]
    try:
        return parser.parse_args([f"--value={text}"]).value
    except ArgumentError:
        raise UserError(
            f"environment variable {variable} must be {type_name(expected)}, got {text!r} (it wins "
            f"over {place}). Set it to such a value, or unset it."
        ) from None


def _type_of(kind: type, key: str) -> Any:
    """The type hint of an argument, where the class or the nearest of its bases names it."""
    hints = (get_type_hints(base.__init__) for base in kind.__mro__)  # type: ignore[misc]
    return next(found[key] for found in hints if key in found)
