"""Combine config files and arguments, in two ways differently from the parser.

The last list of objects replaces earlier ones, which the parser would merge object by object;
mappings of free form are merged key by key, where the parser takes the last one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_grpo.cli.parsing.config_checks import refuse_other_bases
from lit_grpo.cli.parsing.object_checks import refuse_beside, refuse_other_forms

FREE_FORM = ("architecture", "chat_template_kwargs", "columns", "env", "flags", "where")
"""Keys of mappings with names of the user's or of another library: the parser replaces these."""

REWARDS = "model.rewards"
"""The key of a list of objects that may also be written as paths of functions."""


def combined_arguments(
    configs: Sequence[tuple[Path, dict[str, Any]]], others: Sequence[str]
) -> tuple[str, ...]:
    """Return the files as arguments, then the others, with what makes the parser combine them.

    An empty list stands before a list that replaces one of objects, and a merged mapping follows
    the file that adds to it.
    """
    arguments: list[str] = []
    with_objects: set[str] = set()
    mappings: dict[str, dict[str, Any]] = {}

    def add(value: Any, argument: str) -> None:
        for key, items in lists_in(value):
            if key in with_objects:
                arguments.append(f"--{key}=[]")
            if key.removesuffix("+") == REWARDS or any(map(_is_object, items)):
                with_objects.add(key.removesuffix("+"))
        arguments.append(argument)

    for path, config in configs:
        add(config, f"--config={path}")
        arguments += _merging(config, mappings)
    for argument, following in zip(others, [*others, ""][1:], strict=True):
        key, has_value, value = argument.removeprefix("--").partition("=")
        given = {key: value_of(value if has_value else following)}
        refuse_other_forms(given, "the command line")
        refuse_beside(given, "", "the command line")
        add(given, argument)
    return tuple(arguments)


def _merging(config: Mapping[str, Any], earlier: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the arguments that merge a file's mappings with those of the files before it.

    Args:
        earlier: Key without ``init_args`` -> what the files so far say; the file's is added.
    """
    for key, value in _free_mappings(config):
        name = key.replace(".init_args", "")
        before = earlier.get(name, {})
        if value is None or before.get("model_type", "") != value.get("model_type", "") != "":
            before = {}  # removed, or another architecture
        earlier[name] = whole = _merged(before, value or {})
        if whole != (value or {}):
            text = yaml.safe_dump(whole, default_flow_style=True, sort_keys=False, width=math.inf)
            yield f"--{key}={text.strip()}"


def _free_mappings(node: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        inner = f"{key}.{name}" if key else str(name)
        if name in FREE_FORM and (value is None or isinstance(value, dict)):
            yield inner, value
        elif isinstance(value, dict) and name != "sources":  # of a mixture, replaced as a whole
            yield from _free_mappings(value, inner)


def _merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key; other values are replaced."""
    both = {
        name: _merged(before[name], value)
        for name, value in after.items()
        if isinstance(value, dict) and isinstance(before.get(name), dict)
    }
    return {**before, **after, **both}


def lists_in(value: Any, key: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield each list that is a value, with its full key."""
    if isinstance(value, list):
        yield key, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from lists_in(one, f"{key}.{name}" if key else str(name))


def _is_object(item: Any) -> bool:
    """Return whether an item of a list may be an object, given by its keys or the bare class."""
    return isinstance(item, dict) or bool(re.fullmatch(r"(\w+\.)*[A-Z]\w*", str(item)))


def value_of(text: str) -> Any:
    """Return the value of an argument; the parser reports one that is no YAML.

    Raises:
        UserError: a list or mapping has a number that YAML reads in another base, such as 010. The
            parser checks single values.
    """
    try:
        root, value = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None
    if not isinstance(root, yaml.ScalarNode):
        refuse_other_bases(root, None)
    return value
