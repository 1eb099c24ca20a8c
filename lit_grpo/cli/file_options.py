"""Parse the arguments of the commands that take options of their own and no config."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from lit_grpo.cli.commands import ARGUMENTS, EXAMPLES
from lit_grpo.cli.options import OPTIONS
from lit_grpo.types import UserError
from lit_grpo.types.paths import at_home


def parse_options(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command that takes nothing else.

    Raises:
        UserError: the arguments are wrong.
    """
    return _Parser(command).parse_args(_with_underscores(arguments))


def parse_run(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command, and the directory of its run as ``run_dir``.

    Raises:
        UserError: the arguments are wrong.
    """
    given, others = _parse_one(command, arguments)
    _refuse_others(command, others)
    return given


def parse_run_and_keys(
    command: str, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the ``run_dir`` of a command, and all other arguments.

    Raises:
        UserError: the arguments are wrong, or there are others without ``--policy``.
    """
    given, keys = _parse_one(command, arguments)
    if given.policy is None:
        _refuse_others(command, keys)
    return given, keys


def parse_runs(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command, and the directories of its runs as ``run_dirs``.

    Raises:
        UserError: an argument is wrong, or no run is given.
    """
    parser = _Parser(command)
    parser.add_argument("run_dirs", nargs="*", metavar="RUN")
    given = parser.parse_intermixed_args(_with_underscores(arguments))
    if not given.run_dirs:
        raise _needs_argument(command)
    return given


def same_recipe(command: str, given: argparse.Namespace) -> str:
    """Return a command line of another command that reads the same rows and the same cache."""
    words = ["lit-grpo", command, "--preset", given.preset]
    words += [word for one in given.data for word in ("--data", one)]
    words += ["--cache", given.cache] if given.cache else []
    words += ["--bad_rows", given.bad_rows] if given.bad_rows != "refuse" else []
    return shlex.join(words)


def _parse_one(command: str, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the ``run_dir`` of a command, and the arguments that are left."""
    parser = _Parser(command)
    parser.add_argument("run_dir", nargs="?", metavar="RUN")
    given, others = parser.parse_known_args(_with_underscores(arguments))
    if given.run_dir is None:
        _refuse_others(command, others)
        raise _needs_argument(command)
    return given, others


def _refuse_others(command: str, others: Sequence[str]) -> None:
    if others:
        _Parser(command).error(f"unrecognized arguments: {shlex.join(others)}")


def _needs_argument(command: str) -> UserError:
    name, what = ARGUMENTS[command]
    return UserError(
        f"{command} needs {name}: {what}. For example: lit-grpo {command} {EXAMPLES[command][0]}"
    )


def _with_underscores(arguments: Sequence[str]) -> list[str]:
    """Spell options as in the table: ``--dry-run`` is the same as ``--dry_run``."""
    return [
        re.sub(r"^--[\w-]+", lambda option: f"--{option[0][2:].replace('-', '_')}", one)
        for one in arguments
    ]


PATHS = ("DIR", "FILE", "PATH", "RUN")
"""Names of path options and arguments in the help."""


class _Parser(argparse.ArgumentParser):
    """A parser of the options of one command; what is wrong with an argument is one line."""

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"lit-grpo {command}", add_help=False, allow_abbrev=False)
        for name, settings in OPTIONS[command].items():
            self.add_argument(name, **settings)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Return the options, with the home directory in place of the ``~`` of a path."""
        given, others = super().parse_known_args(*args, **kwargs)
        for action in self._actions:
            value = getattr(given, action.dest, None)
            if action.metavar not in PATHS and action.dest != "preset":
                continue
            if value == "None":
                name = "/".join(action.option_strings) or action.metavar
                self.error(f"{name}: None is not a path. Leave it out, or write ./None")
            if isinstance(value, str):
                setattr(given, action.dest, at_home(value))
            elif isinstance(value, list):
                setattr(given, action.dest, [at_home(one) for one in value])
        return given, others

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}. See {self.prog} --help.")
