"""Refuse arguments for any list item but the last, such as ``--model.rewards.0.weight 2``.

The parser would take it for a setting of the last item, the only one that arguments reach.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from jsonargparse import ArgumentParser

from lit_grpo.cli.parsing.invocation import Invocation
from lit_grpo.cli.parsing.merging import lists_in, value_of
from lit_grpo.cli.parsing.suggestions import keys
from lit_grpo.cli.parsing.type_hints import classes, type_of
from lit_grpo.types import UserError
from lit_grpo.types.spelling import did_you_mean

NUMBERED = re.compile(r"(?P<key>.+?)\.(?P<number>\d+)(\.init_args)?(\.(?P<setting>.+))?")


def refuse_other_items(parser: Any, invocation: Invocation) -> None:
    """Check that no argument names an item of a list by its number, or is for one before the last.

    Raises:
        UserError: one does. The message names the class of that item, and its settings if it has
            not the one that is given.
    """
    lists: dict[str, list[Any]] = {}
    for config in invocation.configs:
        _update(lists, config)
    for name, value in _pairs(invocation.arguments):
        found = NUMBERED.fullmatch(name)
        if found and lists.get(found["key"]):
            items = lists[found["key"]]
            raise UserError(f"{name}: {_explain(parser, items, **found.groupdict())}")
        for key, items in lists.items():
            if name.startswith(f"{key}.") and (why := _of_another(parser, items, key, name)):
                raise UserError(f"{name}: {why}")
        if (given := value_of(value)) != []:  # which stands before each list that replaces another
            _update(lists, {name: given})


def _pairs(arguments: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each argument except files."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=False):
        name, has_value, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and name != "config":
            yield name, value if has_value else following


def _update(lists: dict[str, list[Any]], given: dict[str, Any]) -> None:
    """Replace and extend the lists by key with those in a config or an argument."""
    for key, items in lists_in(given):
        is_more = key.endswith("+")
        lists[key.removesuffix("+")] = [*lists.get(key[:-1], []), *items] if is_more else items
    for key, item in given.items():
        if key.endswith("+") and isinstance(item, str):  # --model.rewards+=MathReward
            lists[key[:-1]] = [*lists.get(key[:-1], []), item]


def _explain(parser: Any, items: list[Any], key: str, number: str, setting: str | None) -> str:
    if int(number) >= len(items):
        return f"{key} has only {len(items)}, numbered from 0."
    name, last = _name(items[int(number)]), _name(items[-1])
    settings = _settings(parser, key, name)
    if setting and settings and setting.split(".")[0] not in settings:
        hint = did_you_mean(setting, settings) or f" It has {', '.join(settings)}."
        return f"{name} has no such key.{hint}"
    if setting and int(number) == len(items) - 1:
        return f"an argument sets the last item of a list without its number: {key}.{setting}."
    return _only_last(key, last, f"Set {setting} of {name}" if setting else f"Replace {name}")


def _of_another(parser: Any, items: list[Any], key: str, argument: str) -> str:
    """Return which item has a setting that the last one lacks; empty if there is none."""
    setting = argument.removeprefix(f"{key}.").removeprefix("init_args.")
    name, (*others, last) = setting.split(".")[0], map(_name, items)
    of_last = _settings(parser, key, last)  # none if the parser has to say what is wrong with it
    if setting in ("class_path", "help") or not others or not of_last or name in of_last:
        return ""
    found = next((one for one in others if name in _settings(parser, key, one)), None)
    return _only_last(key, last, f"Set {setting} of {found}") if found else ""


def _only_last(key: str, last: str, change: str) -> str:
    return (
        f"an argument sets only the last item of a list, here {last}. {change} in a config file, "
        f"with all items of {key}."
    )


def _name(item: Any) -> str:
    return str(item.get("class_path") if isinstance(item, dict) else item)


def _settings(parser: Any, key: str, name: str) -> list[str]:
    """Return the settings of the class of an item; none if they cannot be found."""
    known = {kind.__name__: kind for kind in classes(type_of(parser, key))}
    with suppress(Exception):  # of the user's module; the parser reports it
        kind = known.get(name) or pkgutil.resolve_name(name)
        own = ArgumentParser(add_help=False)
        own.add_class_arguments(kind)
        return list(dict.fromkeys(one.split(".")[0].rstrip("+") for one in keys(own)))
    return []
