"""Let environment variables override config keys, so that one config can be swept over ablations.

A class names its variables: ``overridden_by_environment = {"lambda_info": "REWARD_LAMBDA_INFO"}``.
Wherever a config has that class or a subclass, the variable overrides the argument.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.cli.parsing.type_hints import type_name
from lit_grpo.types import UserError

PREFIX = "REWARD_"
"""Variables with this prefix are meant as switches, so warn about one that nothing reads."""

log = logging.getLogger(__name__)


def override(config: Namespace) -> list[tuple[str, str]]:
    """Put the values of variables into a parsed config.

    Return each variable with a line about what it replaced.

    Raises:
        UserError: the argument cannot have this value.
    """
    overridden = []
    for path, node in _classes(config):
        kind, arguments = pkgutil.resolve_name(node["class_path"]), node["init_args"]
        for key, variable in getattr(kind, "overridden_by_environment", {}).items():
            if variable in os.environ and key in arguments:  # a subclass may not take it
                full_key = f"{path}.init_args.{key}"
                value = _read(variable, kind, key, full_key)
                line = f"{variable}={value} overrides {full_key}: {arguments[key]}"
                overridden.append((variable, line))
                arguments[key] = value
    return overridden


@rank_zero_only
def log_overridden(overridden: Sequence[tuple[str, str]]) -> None:
    """Log what ``override`` replaced, and the switches that nothing reads."""
    for _, line in overridden:
        log.warning("%s", line)
    read = {variable for variable, _ in overridden}
    for variable in sorted(os.environ.keys() - read):
        if variable.startswith(PREFIX):
            log.warning("%s is set, but nothing in the config reads it", variable)


def _classes(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, node) for every class with arguments in a config."""
    children = dict(_children(node))
    if "class_path" in children and "init_args" in children:
        yield path, node
    for key, child in children.items():
        yield from _classes(child, f"{path}.{key}" if path else str(key))


def _children(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, Namespace | dict):
        return (vars(node) if isinstance(node, Namespace) else node).items()
    return enumerate(node) if isinstance(node, list | tuple) else ()


def _read(variable: str, kind: type, key: str, full_key: str) -> Any:
    """Return the value of a variable, parsed as the argument would be on the command line."""
    expected = _type_of(kind, key)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=expected)
    text = os.environ[variable]
    try:
        return parser.parse_args([f"--value={text}"]).value
    except ArgumentError:
        raise UserError(
            f"environment variable {variable} must be {type_name(expected)}, got {text!r} (it "
            f"overrides {full_key}). Set it to such a value, or unset it."
        ) from None


def _type_of(kind: type, key: str) -> Any:
    """Return the type hint of an argument, from the class or the nearest base that has it."""
    hints = (get_type_hints(base.__init__) for base in kind.__mro__)  # type: ignore[misc]
    return next(found[key] for found in hints if key in found)
