"""Refuse what a config file says in a form that the parser would not explain, or would let pass."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_grpo.cli.parsing.keys import SECTIONS
from lit_grpo.types import UserError

ENVIRONMENT = re.compile(r"\$\{\s*oc\.env:\s*(\w+)")
OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML reads in base 8 (``010``) or 60 (``1:30``), if it reads them as numbers."""
ODD_SPACE = re.compile(r"[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
"""A space that YAML reads as a letter, such as a non-breaking one."""
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


def refuse_paths_as_sources(config: dict[str, Any], path: Path) -> None:
    """Raise UserError if a mixture's source is not a mapping: the parser would import or read it.

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


def refuse_odd_spaces(root: yaml.Node | None, path: Path) -> None:
    """Raise UserError if a key, or a text without quotes, begins with a space that is none to YAML.

    It would be a part of the text.
    """
    for node in _scalars(root, set(), with_keys=True):
        if node.style is None and (found := ODD_SPACE.match(node.value.lstrip(" -"))):
            raise _odd_space(path, node.start_mark.line + 1, found[0])


def refuse_odd_indents(lines: Sequence[str], path: Path) -> None:
    """Raise UserError if a line, the last of which is no YAML, begins with such a space."""
    for number, line in enumerate(lines, 1):
        if found := ODD_SPACE.match(line.lstrip(" -")):
            raise _odd_space(path, number, found[0])


def _odd_space(path: Path, line: int, space: str) -> UserError:
    return UserError(
        f"{path}, line {line}: expected plain spaces, got U+{ord(space):04X} "
        f"({unicodedata.name(space).lower()}; it looks like a space, and web pages have it), "
        "which YAML takes for a letter. Replace each of them in the file by a space."
    )


def refuse_other_bases(root: yaml.Node | None, path: Path | None) -> None:
    """Raise UserError if a number would be read as a different one than it looks like.

    Args:
        path: The config file; None for a value of the command line.
    """
    for node in _scalars(root, set()):
        is_number = node.tag.rpartition(":")[2] in ("int", "float")
        if is_number and (why := explain_other_base(node.value, yaml.safe_load(node.value))):
            line = node.start_mark.line + 1
            raise UserError(f"{f'{path}, line {line}' if path else 'the command line'}: {why}")


def explain_other_base(text: str, value: object) -> str:
    """Return how YAML has read a number that looks like another one; empty for other values."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or OTHER_BASE.fullmatch(text) is None:
        return ""
    meant: str | int = f"'{text}' in quotes" if ":" in text else int(text, base=10)
    if meant == value:  # as other parsers read it
        return ""
    return f"YAML reads {text} as {value}. Write {value} if that is meant, else {meant}."


def _scalars(
    node: yaml.Node | None, walked: set[int], *, with_keys: bool = False
) -> Iterator[yaml.ScalarNode]:
    """Yield every value of a file but mappings and lists, and the keys if they are wanted."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif node is not None and id(node) not in walked:  # else an alias of what an anchor names
        walked.add(id(node))
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [one for pair in node.value for one in pair[not with_keys :]]
        for child in children:
            yield from _scalars(child, walked, with_keys=with_keys)


def refuse_repeated_keys(root: yaml.Node | None, path: Path) -> None:
    """Raise UserError if a file has a key twice: YAML would silently take the last one."""
    seen: dict[str, int] = {}
    for key, line in _keys_in(root, "", set()):
        if key in seen:
            first, last = sorted((seen[key], line))
            where = f"line {first}" if first == last else f"lines {first} and {last}"
            raise UserError(
                f"{path}, {where}: the key {key} must appear only once in a file, got it twice "
                "(the last one would replace the first). Remove or rename one of them."
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
