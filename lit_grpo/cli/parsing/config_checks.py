"""Refuse what a config file says in a form that the parser would not explain, or would let pass."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lit_grpo.cli.parsing.keys import SECTIONS
from lit_grpo.types import UserError

ENVIRONMENT = re.compile(r"\$\{\s*oc\.env:\s*(\w+)")
OTHER_BASE = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""Numbers that YAML reads in base 8 (``010``) or 60 (``1:30``)."""
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)S?(_|$)", re.IGNORECASE)


def refuse_empty(config: Any, prefix: str, path: Path) -> None:
    """Raise UserError if a section has no keys: the parser would fail without its name."""
    items = config.items() if isinstance(config, dict) else enumerate(config)
    for key, value in items:
        is_section = key == "init_args" or (not prefix and key in ("trainer", "model", "data"))
        if is_section and value is None:
            raise UserError(
                f"{path}: {prefix}{key} must have keys under it, got nothing. Indent the lines "
                "that belong under it by two spaces more than this one, or remove it."
            )
        if key == "init_args" and isinstance(value, str):
            raise UserError(
                f"{path}: {prefix}{key} must have keys under it, got {value!r:.60}. Write each as "
                "KEY: VALUE, with a space after the colon."
            )
        if isinstance(value, dict | list):
            refuse_empty(value, f"{prefix}{key}.", path)


def refuse_mapping(config: dict[str, Any], path: Path) -> None:
    """Raise UserError if the callbacks are a mapping by class: the parser would not say so."""
    trainer = config.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, dict) else None
    listed = callbacks if isinstance(callbacks, list) else [callbacks]
    for one in listed:
        if isinstance(one, dict) and "class_path" not in one and one:
            name = next(iter(one))
            raise UserError(
                f"{path}: trainer.callbacks must be a list of classes, got a mapping with the key "
                f"{name}. Write callbacks: [{name}], or with settings "
                f"[{{class_path: {name}, init_args: {{...}}}}]."
            )


def refuse_paths_as_sources(config: dict[str, Any], path: Path) -> None:
    """Raise UserError if a source of a mixture is no mapping: the parser would import or read it.

    It may be another YAML file.
    """
    data = config.get("data")
    arguments = data.get("init_args") if isinstance(data, dict) else None
    sources = arguments.get("sources") if isinstance(arguments, dict) else None
    for name, source in sources.items() if isinstance(sources, dict) else ():
        if not (isinstance(source, dict) or str(source).endswith((".yaml", ".yml"))):
            file = source if isinstance(source, str) else "FILE"
            raise UserError(
                f"{path}: data.sources.{name} must be a source, got {source}. Write {{data: "
                f"{{class_path: PromptData, init_args: {{train: {file}}}}}}}."
            )


def refuse_misplaced(config: dict[str, Any], path: Path) -> None:
    """Raise UserError if a section stands under another: the parser would look for a close key."""
    for section in ("model", "trainer"):
        keys = config.get(section)
        for name in keys if isinstance(keys, dict) else ():
            if name in SECTIONS:
                raise UserError(
                    f"{path}: {section}.{name}: no such key. {name} belongs at the top level, "
                    f"not under {section}."
                )


def refuse_beside(node: Any, key: str, where: str) -> None:
    """Raise UserError if arguments of a class stand beside its path: the parser would not name it.

    Args:
        key: That of the node.
        where: What the node is read from.
    """
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for name, child in children:
        if isinstance(child, dict | list):
            refuse_beside(child, f"{key}.{name}" if key else str(name), where)
    if not isinstance(node, dict) or "class_path" not in node:
        return
    given = node.get("init_args")
    beside = {
        name: value
        for name, value in node.items()
        if name not in ("class_path", "dict_kwargs") and not str(name).startswith("init_args")
    }
    for name in beside:
        if difflib.get_close_matches(str(name), ["init_args"], cutoff=0.8):
            raise UserError(f"{where}: {key}.{name}: no such key. Did you mean init_args?")
    if beside:
        arguments = {**(given if isinstance(given, dict) else {}), **beside}
        right = {"class_path": node["class_path"], "init_args": arguments}
        shown = yaml.safe_dump(right, default_flow_style=True, sort_keys=False, width=math.inf)
        raise UserError(
            f"{where}: {key}: {' and '.join(map(str, beside))} must stand under init_args, got it "
            f"beside class_path. Write {shown.strip()}."
        )


def refuse_other_bases(root: yaml.Node | None, path: Path) -> None:
    """Raise UserError if a number would be read as another one than it looks like."""
    for node in _scalars(root, set()):
        is_number = node.tag.rpartition(":")[2] in ("int", "float")
        if is_number and OTHER_BASE.fullmatch(node.value):
            number = yaml.safe_load(node.value)
            in_quotes = f"'{node.value}' in quotes"
            meant = in_quotes if ":" in node.value else int(node.value, base=10)
            raise UserError(
                f"{path}, line {node.start_mark.line + 1}: YAML reads {node.value} as {number}. "
                f"Write {number} if that is meant, else {meant}."
            )


def _scalars(node: yaml.Node | None, walked: set[int]) -> Iterator[yaml.ScalarNode]:
    """Yield every value of a file that is no mapping or list."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif node is not None and id(node) not in walked:  # else an alias of what an anchor names
        walked.add(id(node))
        is_mapping = isinstance(node, yaml.MappingNode)
        for child in (value for _, value in node.value) if is_mapping else node.value:
            yield from _scalars(child, walked)


def refuse_repeated_keys(root: yaml.Node | None, path: Path) -> None:
    """Raise UserError if a file has a key twice: YAML would silently take the last one."""
    seen: dict[str, int] = {}
    for key, line in _keys_in(root, "", set()):
        if key in seen:
            first, last = sorted((seen[key], line))
            where = f"line {first}" if first == last else f"lines {first} and {last}"
            raise UserError(
                f"{path}, {where}: the key {key} must stand once in a file, got it twice (the "
                "last one would replace the first). Remove or rename one of them."
            )
        seen[key] = line


def _keys_in(node: yaml.Node | None, prefix: str, walked: set[int]) -> Iterator[tuple[str, int]]:
    """Yield every key as ``model.rewards.0.class_path`` with its line.

    Merge keys (``<<``) are left out: they may be repeated, and their keys overridden.
    """
    if id(node) in walked:  # an alias of what an anchor names
        return
    walked.add(id(node))
    children: list[tuple[str, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if key.tag != "tag:yaml.org,2002:merge":
                yield name, key.start_mark.line + 1
            children.append((name, value))
    elif isinstance(node, yaml.SequenceNode):
        children = [(f"{prefix}{number}", one) for number, one in enumerate(node.value)]
    for name, child in children:
        yield from _keys_in(child, f"{name}.", walked)


def refuse_secrets(values: Any, where: str) -> None:
    """Raise UserError if a secret is interpolated: it would be saved with the config."""
    for variable in ENVIRONMENT.findall(str(values)):
        if SECRET.search(variable):
            raise UserError(
                f"{where}: ${{oc.env:{variable}}} would be written into the saved config.yaml in "
                f"plain text. Use a key that takes the name of the variable, such as "
                f"judge.secret_variable: {variable}."
            )
