"""Refuse what a config gives for an object, if it is not its class_path with init_args."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from types import NoneType
from typing import Any

import yaml

from lit_grpo.types import UserError

LISTS = ("model.rewards", "trainer.callbacks")
OBJECTS = (*LISTS, "data", "model.engine", "model.optimizer", "model.evaluation.accuracy")
"""Keys of objects that people write in the form of another library."""

CLASS_PATHS = ("class", "cls", "type", "name", "path", "target", "_target_")
"""Names of a class's path in other libraries."""
ARGUMENTS = ("args", "kwargs", "arguments", "params", "parameters", "init_kwargs")
"""Names of a class's arguments in other libraries."""

_CLASS = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*")
_BASE_OF_CHECKPOINTS = re.compile(r"((pytorch_)?lightning\.(\w+\.)*)?Checkpoint")


def refuse_other_forms(config: dict[str, Any], where: str) -> None:
    """Raise UserError if an object is given in another form, which the parser would not explain.

    Args:
        config: What a config file says, or the whole key of an argument with its value.
        where: What it is read from.
    """
    for key in OBJECTS:
        for name, node in _values(config, key):
            if isinstance(node, dict) and name in LISTS:
                _refuse_mapping(node, key, where)
            items = node if isinstance(node, list) else [node]
            for number, item in enumerate(items):
                _refuse_item(item, f"{key}.{number}" if isinstance(node, list) else key, where)


def _values(config: dict[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """Yield what a config has at a key, and what it appends to it, as ``model.rewards+``."""
    section, _, rest = key.partition(".")
    for name in (key, f"{key}+"):
        if name in config:
            yield name, config[name]
    inner = config.get(section)
    if rest and isinstance(inner, dict):
        for place in (inner, inner.get("init_args")):
            if isinstance(place, dict):
                yield from ((f"{section}.{name}", value) for name, value in _values(place, rest))


def _refuse_item(item: Any, key: str, where: str) -> None:
    if forms := _right_forms(item):
        raise UserError(
            f"{where}: {key} must be a class, got a mapping with the key {next(iter(item))}. Write "
            f"{', '.join(map(_in_one_line, forms))}."
        )
    path = item.get("class_path") if isinstance(item, dict) else item
    if isinstance(path, str) and _BASE_OF_CHECKPOINTS.fullmatch(path):
        raise UserError(
            f"{where}: {key}: {path} is only the base class of others, and saves nothing. Did you "
            "mean Checkpoints?"
        )


def _refuse_mapping(node: dict[str, Any], key: str, where: str) -> None:
    """Raise UserError if classes that belong in a list are a mapping."""
    is_one = key == "model.rewards" and "class_path" in node
    if forms := [node] if is_one else _right_forms(node):
        raise UserError(
            f"{where}: {key} must be a list of classes, got a mapping with the key "
            f"{next(iter(node))}. Write {key.rpartition('.')[2]}: {_in_one_line(forms)}."
        )


def _right_forms(item: Any) -> list[Any]:
    """Return the objects that are meant by a mapping without a class path; none if unknown."""
    if not isinstance(item, dict) or not item or "class_path" in item:
        return []
    if all(_is_class(name) and isinstance(one, dict | NoneType) for name, one in item.items()):
        return [
            {"class_path": name, "init_args": one} if one else name for name, one in item.items()
        ]
    for name in CLASS_PATHS:
        if _is_class(item.get(name)):
            others = {key: value for key, value in item.items() if key != name}
            arguments = _merged(others)
            return [{"class_path": item[name], **({"init_args": arguments} if arguments else {})}]
    return []


def _is_class(name: Any) -> bool:
    return isinstance(name, str) and _CLASS.fullmatch(name) is not None


def _merged(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments, with any mapping that holds several of them merged into the rest."""
    merged: dict[str, Any] = {}
    for name, value in arguments.items():
        is_all = name in ("init_args", *ARGUMENTS) and isinstance(value, dict)
        merged |= value if is_all else {name: value}
    return merged


def refuse_beside(node: Any, key: str, where: str) -> None:
    """Raise UserError if a class's arguments are next to its path: the parser would not name it.

    Args:
        key: The node's.
        where: What the node is read from.
    """
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for name, child in children:
        if isinstance(child, dict | list):
            refuse_beside(child, f"{key}.{name}" if key else str(name), where)
    if not isinstance(node, dict) or "class_path" not in node:
        return
    beside = {
        name: value
        for name, value in node.items()
        if name not in ("class_path", "dict_kwargs") and not str(name).startswith("init_args")
    }
    for name, value in beside.items():
        is_other = name in ARGUMENTS and isinstance(value, dict)
        if is_other or difflib.get_close_matches(str(name), ["init_args"], cutoff=0.8):
            raise UserError(f"{where}: {key}.{name}: no such key. Did you mean init_args?")
    if empty := [name for name in beside if beside[name] is None]:
        below = " and ".join(name for name in ("class_path", "init_args") if name in node)
        raise UserError(
            f"{where}: {key}.{empty[-1]} is empty, and {below} stand beside it, not below it. "
            "Indent them by two more spaces."
        )
    if beside:
        given = node.get("init_args")
        arguments = {**(given if isinstance(given, dict) else {}), **beside}
        right = {"class_path": node["class_path"], "init_args": arguments}
        raise UserError(
            f"{where}: {key}: {' and '.join(map(str, beside))} must be under init_args, got it "
            f"beside class_path. Write {_in_one_line(right)}."
        )


def _in_one_line(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, str):
        return value
    shown = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
    return str(shown).strip()
