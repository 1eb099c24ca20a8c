"""The help of a command: the keys that people set, or with ``--help=all`` every key.

Only ``--help=all`` imports slow modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lit_grpo.cli.commands import describe, usage
from lit_grpo.cli.options import OPTIONS
from lit_grpo.cli.parsing.keys import main_keys
from lit_grpo.runs.tables import open_console

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from lit_grpo.cli.parsing.invocation import Invocation


CLASS_KEYS = (
    *("trainer.logger", "trainer.callbacks", "model.engine", "model.optimizer", "model.rewards"),
    "data",
)
"""Keys that take a class or a list of them."""


def print_help(command: str) -> None:
    """Print what a command does, examples, and the keys that people set."""
    print(f"usage: {usage(command)}\n\n{describe(command)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "default", "meaning"):
        table.add_column(column, no_wrap=column == "key", overflow="fold")
    for name, settings in OPTIONS.get(command, {}).items():
        default = str(settings.get("default", "null")).lower()
        table.add_row(name.lstrip("-"), default, settings["help"])
    for key, (default, meaning) in main_keys(command).items():
        table.add_row(key, default, meaning)
    open_console().print(table)
    print(
        f"\nA file holds the same keys as YAML. lit-grpo {command} --help=all lists every key, "
        "also\nthose of the classes that --config and arguments choose. --print_config prints the "
        "whole config."
    )


def print_all_keys(command: str, invocation: Invocation) -> None:
    """Print every key of a command, and of the classes that configs and arguments choose."""
    from jsonargparse import capture_parser

    from lit_grpo.cli.command_line import CommandLine

    parser = capture_parser(lambda: CommandLine(command, invocation, "runs/NAME/N"))
    _name_groups_by_key(parser)
    parser.print_help()
    for key, class_path in _classes_in(invocation):
        with suppress(SystemExit):
            parser.parse_args([f"--{key}.help={class_path}"])


def _name_groups_by_key(parser: ArgumentParser) -> None:
    """Replace titles, which are the first lines of docstrings, with the key of the group."""
    for group in parser._action_groups:
        parents = Counter(action.dest.rpartition(".")[0] for action in group._group_actions)
        if group.title == "options" or not parents:
            continue
        ((common, _),) = parents.most_common(1)
        group.title = common or group._group_actions[0].dest


def _classes_in(invocation: Invocation) -> Iterator[tuple[str, str]]:
    """Yield the keys that take a class, with each class that is chosen."""
    import yaml

    from lit_grpo.cli.parsing.invocation import last_value
    from lit_grpo.runs.files.config import argument

    seen = set()
    for key in CLASS_KEYS:
        values = [argument(config, *key.split(".")) for config in invocation.configs]
        given = last_value(key, [], invocation.arguments)
        values.append(None if given is None else yaml.safe_load(given))
        for found in chain.from_iterable(map(_named, values)):
            if (key, found) not in seen:
                seen.add((key, found))
                yield key, found


def _named(value: Any) -> Iterator[str]:
    """Yield the classes of a value, which may be a list."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, Mapping) and "class_path" in one:
            yield str(one["class_path"])
        elif isinstance(one, str):
            yield one
