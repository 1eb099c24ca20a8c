"""Suggest a key instead of one that does not exist."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, get_origin, get_type_hints

from lit_grpo.cli.commands import BUNDLED
from lit_grpo.cli.parsing.keys import KEYS, SECTIONS
from lit_grpo.cli.parsing.training_kind import keys_of_grpo
from lit_grpo.cli.parsing.type_hints import classes, type_of
from lit_grpo.types import foreign_keys
from lit_grpo.types.foreign_values import counterpart
from lit_grpo.types.spelling import did_you_mean, other_form

SLIP = 0.9
"""Similarity of a word with a typo; ``reward`` and ``rewards`` have 0.92."""
MAX_DEPTH = 2
"""How deep in classes a key is looked for; classes may contain each other."""


def keys(parser: Any) -> list[str]:
    """Return every option of a parser without its dashes: ``trainer.max_steps``."""
    return [option.lstrip("-") for action in parser._actions for option in action.option_strings]


def unknown_section(parser: Any, key: str) -> tuple[str, set[str]]:
    """Return the part of a key up to the first name that is unknown, and the names beside that."""
    parts = key.split(".")
    level, siblings = _first_unknown(parts, [path.split(".") for path in keys(parser)])
    return ".".join(parts[: level + 1]), siblings


def _first_unknown(parts: Sequence[str], paths: Sequence[Sequence[str]]) -> tuple[int, set[str]]:
    """Return the level of the first unknown name, the length if there is none, and its siblings."""
    for level, part in enumerate(parts):
        siblings = {
            path[level] for path in paths if len(path) > level and path[:level] == parts[:level]
        }
        if part not in siblings:
            return level, siblings
    return len(parts), set()


def suggest_key(parser: Any, key: str) -> str:
    """Suggest the key of the same name, or the same meaning, elsewhere; else the closest key."""
    name, known = key.rsplit(".", 1)[-1], keys(parser)
    if f"{key}_variable" in known:  # of a secret
        return f" Did you mean {key}_variable?"
    meant = foreign_keys.KEYS.get(name, "")
    if meant.rsplit(".", 1)[-1] in known:  # of a class, such as lr of an optimizer
        return f" Did you mean {meant.rsplit('.', 1)[-1]}?"
    if meant and not meant.endswith(f".{name}"):
        return f" Set {meant}."
    if "trainer.max_steps" in known:  # of a whole config
        section, _, rest = key.partition(".")
        is_of_grpo = section == "model" and rest.split(".")[0] in keys_of_grpo()
        if "model.target_column" in known and is_of_grpo:
            return " Only GRPO has it: lit-grpo fit."
        return suggest(key, [*known, *KEYS, *class_keys(parser)])
    of_config = [one for one in (*SECTIONS, *KEYS) if one.rsplit(".", 1)[-1] == name]
    return elsewhere(of_config[0]) if of_config else suggest(key, known)


def suggest_value(key: str, value: str) -> str:
    """Return `` Did you mean X?`` for a value of another library, else nothing.

    A preset is named too, if the value is a method that has one.
    """
    if not (ours := counterpart(key, value)):
        return ""
    name = value.lower().replace("-", "_")
    has_preset = (BUNDLED / "presets" / f"{name}.yaml").is_file()
    preset = f" The whole method: --config presets/{name}." if has_preset else ""
    return f" Did you mean {ours}?{preset}"


def class_keys(parser: Any) -> Iterator[str]:
    """Yield the keys of the classes that the model and the data may have: ``model.engine.servers``.

    Those in a list are left out, since their place in it is part of the key.
    """
    for action in parser._actions:
        if re.match(r"(model|data)(?!.*help$)", action.dest):
            yield from _keys_of(action.dest, type_of(parser, action.dest))


def _keys_of(key: str, hint: Any) -> Iterator[str]:
    for kind in classes(hint) if get_origin(hint) is not list else ():
        for name, inner in _parameters(kind):
            yield f"{key}.{name}"
            if key.count(".") < MAX_DEPTH:
                yield from _keys_of(f"{key}.{name}", inner)


@cache
def _parameters(kind: Any) -> list[tuple[str, Any]]:
    """Return the parameters of a class with their types, none of what has no signature."""
    with suppress(NameError, TypeError, ValueError):
        hints = get_type_hints(kind.__init__)
        return [(name, hints.get(name)) for name in inspect.signature(kind).parameters]
    return []


def elsewhere(key: str) -> str:
    """Return where a key belongs that was given in another place."""
    return f" {key} belongs at the top level." if key in SECTIONS else f" Did you mean {key}?"


def suggest(key: str, known: Iterable[str]) -> str:
    """Suggest a last word without a typo, a key of the same name elsewhere, or a close word."""
    paths = [path.split(".") for path in known]
    parts = key.split(".")
    level, siblings = _first_unknown(parts, paths)
    if level == len(parts):
        return ""
    part = parts[level]
    if part in SECTIONS:
        return elsewhere(part)
    is_last = level == len(parts) - 1
    if is_last and (hint := did_you_mean(part, siblings, similarity=SLIP)):
        return hint
    others = [".".join(path) for path in paths if path[-1] == parts[-1]]
    if others:
        return elsewhere(others[0])
    return did_you_mean(part, siblings) or other_form(part, siblings)
