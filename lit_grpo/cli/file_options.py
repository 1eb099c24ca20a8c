"""Parse the arguments of a command that takes a run and options, but no config."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from lit_grpo.cli.commands import OPTIONS
from lit_grpo.types import UserError


def parse_options(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the run directory and the options of a command.

    Raises:
        UserError: the arguments are wrong.
    """
    parser = _Parser(prog=f"lit-grpo {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("run_dir")
    for name, settings in OPTIONS[command].items():
        parser.add_argument(name, **settings)
    return parser.parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}. See {self.prog} --help.")
